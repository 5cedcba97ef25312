"""Output of ``realmops init``: the files of a new project, and the choices that its documents determine."""
