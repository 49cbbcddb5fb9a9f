"""What a plan needs to know: how much noise a precision adds, and how many seconds it takes."""
