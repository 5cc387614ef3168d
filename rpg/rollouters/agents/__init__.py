"""Our programs of agents: each module holds one, is called what a spec calls it, and says what options it takes."""
