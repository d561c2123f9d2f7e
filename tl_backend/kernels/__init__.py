"""TileLang programs and nothing else: (problem, config, device) -> prim_func. Importing a module here imports TileLang."""
