"""Structure-aware fuzzing of every file that a command reads, and of every option; kills while it writes."""
