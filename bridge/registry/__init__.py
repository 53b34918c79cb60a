"""`MixedPrecisionConfig`, the registry of recipes, and the places that recipes come from.

    MixedPrecisionConfig   a precision, with a record of stated fields     mixed_precision_config.py
    register, Registry     names of recipes and their functions            registry.py
    SourceLocation         the source location of a recipe's function      source_location.py
    synchronize            writes a precision into Megatron's configs      synchronize.py
    PrecisionSchedule      the precision of each phase of a run            schedule.py
    to_config              a node of a composed config as a precision      composed.py
    register_group         the registry as a group of Hydra                hydra_group.py
    format_nearest_label   the recipe nearest to a nameless precision      nearest_recipe.py
    make_saved_entry       a precision in a file of Megatron Bridge       saved_entry.py
    from_peer              Megatron Bridge's class, read into ours         peer.py

To add a recipe:

- a built-in recipe is a function with `@register` in `recipes/`, at the top of the repository, in the
  file of its scaling scheme, which `recipes/__init__.py` imports. The entry-point group
  `bridge.recipes` names the package;
- a recipe of a team is such a function in any module. An installed package names the module in the
  entry-point group `bridge.recipes`; without a package the variable `BRIDGE_RECIPES`, or a run's
  `recipes_from`, names the module or the file;
- a YAML file in a folder `mixed_precision/` of a config tree is an option of that name.
"""
