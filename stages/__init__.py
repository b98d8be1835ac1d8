"""Pure handlers, one a file, named by the word a user would use: facts in, outcome out."""
