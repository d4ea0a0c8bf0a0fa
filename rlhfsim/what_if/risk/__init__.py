"""One joint draw of step times: every probability and quantile of an answer is read from it."""
