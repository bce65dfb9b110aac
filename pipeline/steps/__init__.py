"""Steps of one's own: commands and functions with inputs, outputs and a content key, made once below ``runs/steps/``.

``declared`` reads them, ``key`` says what each is made of, ``graph`` what needs what and how each stands, ``making``
makes them, ``source`` gives them to a run as its data.
"""
