//! What MCP clients read about each command.

/// Each command with its description, by category.
pub const DESCRIPTIONS: [(&str, &str); 0] = [];

/// The description of a command that is known here.
pub fn describe(command: &str) -> Option<&'static str> {
    DESCRIPTIONS.iter().find(|(name, _)| *name == command).map(|(_, description)| *description)
}
