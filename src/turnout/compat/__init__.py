"""Other packages' names and signatures over turnout's ops, so that code written for them runs unchanged."""
