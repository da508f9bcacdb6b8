"""Creates the process groups of grids: chooses strategies, lets ranks agree, and calls torch."""
