"""Examples. This file makes them a package of this folder, before packages of the same name that others install."""
