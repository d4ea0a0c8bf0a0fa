"""What each framework runs and how that is known, and what its software costs: tables that physics reads."""
