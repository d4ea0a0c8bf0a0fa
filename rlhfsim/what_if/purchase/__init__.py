"""What to buy, reserve and rent for a mix of jobs over three years, and what that costs."""
