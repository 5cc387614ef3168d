"""What a terminal is shown: texts that cannot command it (`spelling`), and Rich's console for them (`console`)."""
