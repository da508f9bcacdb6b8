"""Connecting the process groups that exist, before the first step of a training needs them."""
