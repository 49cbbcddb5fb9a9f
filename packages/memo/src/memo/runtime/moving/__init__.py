"""How items go out of the device and come back."""
