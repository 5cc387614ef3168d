"""Safe text for a terminal, which cannot command it (`streams`), for Rich's console (`console`), and for cells of a
spreadsheet or of Markdown (`cells`)."""
