"""Text for a terminal: it cannot command the terminal (`streams`), and Rich's console prints it (`console`). Text for
cells of a spreadsheet and of Markdown (`cells`)."""
