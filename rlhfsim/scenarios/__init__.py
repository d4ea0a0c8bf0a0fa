"""What-if: differences between plans and runs."""
