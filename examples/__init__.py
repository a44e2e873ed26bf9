"""Code of a user: a method, a model and a data set. A package, because Opacus installs one of the same name."""
