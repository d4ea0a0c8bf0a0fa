"""Valid questions at random: every command answers, and no two commands answer one question differently."""
