"""What pytest and hypothesis load of hypercomm when they start: light, and the rest on use.

A package of its own, so that not even `import hypercomm` happens in a run that does without it.
"""
