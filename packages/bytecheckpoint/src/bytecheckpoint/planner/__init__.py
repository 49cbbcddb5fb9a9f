"""The plan of a save: which rank writes which bytes of which tensor to which file."""
