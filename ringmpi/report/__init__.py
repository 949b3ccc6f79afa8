"""Results for people: tables in the terminal, plots in files. Knows files, not how runs are made."""
