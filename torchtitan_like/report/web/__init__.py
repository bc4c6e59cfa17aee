"""`titan run watch --web`: a server of live pages about the runs in a folder."""
