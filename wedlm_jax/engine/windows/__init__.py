"""How wide the window of each sequence is: as asked for, or by load."""
