"""What ``realmops init`` writes: the files of a new project, and the choices that its documents determine."""
