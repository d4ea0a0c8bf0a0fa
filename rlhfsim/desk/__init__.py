"""The desk: a question that is moved in a browser, and its answer, designed anew while one looks."""
