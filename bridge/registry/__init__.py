"""`MixedPrecisionConfig`, the registry of recipes, and the places that recipes come from.

    MixedPrecisionConfig   a precision with what was stated of it          config.py
    register, Registry     names of recipes and their functions            registry.py
      Place                  where the function of a recipe is defined       definition.py
    synchronize            a precision, written into Megatron's configs    synchronize.py
    PrecisionSchedule      the precisions of a run in phases               schedule.py
    to_config              a node of a composed config as a precision      composed.py
    register_group         the registry as a group of Hydra                hydra_group.py
    nearest_label          the recipe that a nameless precision is near    nearest.py
    from_peer              Megatron Bridge's class, read into ours         peer.py

To add a recipe:

- a built-in recipe is a function with `@register` in `recipes/`, at the top of the repository, in the
  file of its scaling scheme, which `recipes/__init__.py` imports. The package arrives through the
  entry-point group `bridge.recipes`;
- a recipe of a team is such a function in any module. An installed package names the module in the
  entry-point group `bridge.recipes`; without a package the variable `BRIDGE_RECIPES`, or a run's
  `recipes_from`, names the module or the file;
- a YAML file in a folder `mixed_precision/` of a config tree is an option of that name.
"""
