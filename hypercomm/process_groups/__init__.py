"""Creates the process groups of grids: chooses strategies, lets ranks meet, and calls torch."""
