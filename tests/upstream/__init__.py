"""The tests of torch's own launcher, with our modules in the place of torch's. Forbidden: their
text, which is read from a folder that a person names."""
