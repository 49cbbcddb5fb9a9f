"""Pipeline stages whose boundary messages are logged, and their replay."""
