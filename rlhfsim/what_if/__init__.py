"""Design again under a change: break-evens, gains, why-not, remedies, sizing, scenarios."""
