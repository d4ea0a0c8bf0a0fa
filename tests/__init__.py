"""A package: `tests` folders that other distributions leave in site-packages would hide a folder that is none."""
