"""The vocabulary that the fuser and the tile compiler share: expressions, views and region specs."""
