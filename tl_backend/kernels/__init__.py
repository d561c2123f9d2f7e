"""TileLang programs and nothing else: (problem, config, dialect) -> prim_func. Importing one imports TileLang."""
