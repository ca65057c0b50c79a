"""Parts that are independent of graphs: the log, names, the user's source lines, pages and pictures, processes."""
