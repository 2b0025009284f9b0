"""A model of a billion parameters over three hosts: does each hold its share, and only that?"""
