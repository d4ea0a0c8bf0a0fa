"""Rule rewards: answer matcher, format checker, sandboxed code executor, functions of the user."""
