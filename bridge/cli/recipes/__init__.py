"""`precision-bridge recipes`: the list, one recipe, the difference of two, and their GPUs.

command.py        the arguments, and the choice of an answer
recipe_list.py    the list of recipes
show.py           one recipe with its fields
difference.py     the fields in which two recipes differ
support.py        ``--support``: which recipe runs on which GPU
named_recipe.py   `NamedRecipe`: a recipe of the registry or of a team's folder
"""
