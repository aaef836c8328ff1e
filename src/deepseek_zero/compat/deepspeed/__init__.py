"""DeepSpeed's functions, classes, arguments, files, and its drop-in package."""
