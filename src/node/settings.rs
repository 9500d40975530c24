//! The node's settings file: which transports it opens and which capabilities it has.
//!
//! `settings.json` lies in the folder of the token file. The desktop app's file has the same names, so members that
//! are not known here are kept as they are. A file that cannot be read is an error, and is never written over.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::private_file;

/// The file's name.
pub const FILE_NAME: &str = "settings.json";
/// The most bytes of the file.
const MAX_BYTES: u64 = 1024 * 1024;
/// Whether the local MCP server runs. Without a word on it, it does.
pub const LOCAL_MCP: &str = "EnableMcpServer";
/// Whether a bridge to a proxy is kept. Without a word on it, it is if a proxy is named.
pub const BRIDGE: &str = "EnableNodeMode";
/// The one switch of earlier versions, for both.
const LEGACY: &str = "McpOnlyMode";

/// A group of commands that can be switched off, and whether it is on without a word on it.
pub const CAPABILITIES: [(&str, bool); 8] = [
    ("NodeSystemRunEnabled", true),
    ("NodeScreenEnabled", true),
    ("NodeCanvasEnabled", true),
    ("NodeCameraEnabled", true),
    ("NodeLocationEnabled", true),
    ("NodeBrowserProxyEnabled", true),
    ("NodeTtsEnabled", false),
    ("NodeSttEnabled", false),
];

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read or written.
    #[error("The settings file {file} cannot be {done}: {why}.", file = .0.display(), done = .1, why = .2)]
    Io(PathBuf, &'static str, io::Error),
    /// The file is no JSON object.
    #[error("The settings file {file} is not a JSON object: {why}.", file = .0.display(), why = .1)]
    Malformed(PathBuf, String),
    /// A switch is something else.
    #[error("{0} must be true or false in the settings file.")]
    NotASwitch(String),
    /// There is no such switch.
    #[error("There is no setting {0:.64}. The settings are: {names}.", names = names().join(", "))]
    Unknown(String),
}

/// The names of all switches.
pub fn names() -> Vec<&'static str> {
    [LOCAL_MCP, BRIDGE].into_iter().chain(CAPABILITIES.iter().map(|(name, _)| *name)).collect()
}

/// What the file says.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Settings {
    members: Map<String, Value>,
}

impl Settings {
    /// Reads the file; one that is missing says nothing. The one switch of earlier versions becomes the two, once.
    ///
    /// # Errors
    /// [`SettingsError`] if it cannot be used.
    pub fn load(path: &Path) -> Result<Self, SettingsError> {
        let read = private_file::read(path, MAX_BYTES);
        let text = match read.map_err(|error| SettingsError::Io(path.to_owned(), "read", error))? {
            Some(text) => text,
            None => return Ok(Self::default()),
        };
        let text = text.trim_start_matches('\u{feff}');
        let members =
            serde_json::from_str(text).map_err(|error| SettingsError::Malformed(path.to_owned(), error.to_string()))?;
        let mut settings = Settings { members };
        if let Some(was_local_only) = settings.switch(LEGACY)? {
            settings.members.remove(LEGACY);
            if was_local_only {
                settings.members.insert(LOCAL_MCP.into(), true.into());
                settings.members.insert(BRIDGE.into(), false.into());
            }
            settings.save(path)?;
        }
        for name in names() {
            settings.switch(name)?;
        }
        Ok(settings)
    }

    /// Writes the file, whole or not at all.
    ///
    /// # Errors
    /// [`SettingsError::Io`].
    pub fn save(&self, path: &Path) -> Result<(), SettingsError> {
        let text = format!("{:#}\n", Value::Object(self.members.clone()));
        let failed = |error| SettingsError::Io(path.to_owned(), "written", error);
        private_file::write(path, text.as_bytes()).map_err(failed)
    }

    /// A switch, if the file has it.
    ///
    /// # Errors
    /// [`SettingsError::NotASwitch`] if it is neither true nor false.
    pub fn switch(&self, name: &str) -> Result<Option<bool>, SettingsError> {
        match self.members.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(on)) => Ok(Some(*on)),
            Some(_) => Err(SettingsError::NotASwitch(name.to_owned())),
        }
    }

    /// Whether a group of commands is on.
    pub fn is_enabled(&self, name: &str) -> bool {
        let default = CAPABILITIES.iter().any(|(known, default)| *known == name && *default);
        // Checked when it was read.
        self.switch(name).ok().flatten().unwrap_or(default)
    }

    /// Sets a switch.
    ///
    /// # Errors
    /// [`SettingsError::Unknown`] if there is none of this name.
    pub fn set(&mut self, name: &str, on: bool) -> Result<(), SettingsError> {
        if !names().contains(&name) {
            return Err(SettingsError::Unknown(name.to_owned()));
        }
        self.members.insert(name.to_owned(), on.into());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;

    fn in_folder(test: &str, content: Option<&str>, check: impl FnOnce(&Path)) {
        let folder = std::env::temp_dir().join(format!("openclaw-settings-{test}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join(FILE_NAME);
        if let Some(content) = content {
            fs::write(&path, content).unwrap();
        }
        check(&path);
        fs::remove_dir_all(folder).unwrap();
    }

    fn file(path: &Path) -> Value {
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
    }

    #[test]
    fn without_a_file_the_defaults_hold() {
        in_folder("none", None, |path| {
            let settings = Settings::load(path).unwrap();
            assert_eq!((settings.switch(LOCAL_MCP).unwrap(), settings.switch(BRIDGE).unwrap()), (None, None));
            let on: Vec<_> = CAPABILITIES.iter().filter(|(name, _)| settings.is_enabled(name)).collect();
            assert_eq!(on.len(), 6);
            assert!(!settings.is_enabled("NodeTtsEnabled") && !settings.is_enabled("NodeSttEnabled"));
            assert!(!path.exists());
        });
    }

    #[test]
    fn the_legacy_switch_becomes_two_once_and_nothing_else_is_lost() {
        let old = "\u{feff}{\"McpOnlyMode\":true,\"EnableNodeMode\":true,\"Theme\":{\"a\":[1.50]}}";
        in_folder("legacy", Some(old), |path| {
            let settings = Settings::load(path).unwrap();
            let switches = |settings: &Settings| [LOCAL_MCP, BRIDGE].map(|name| settings.switch(name).unwrap());
            assert_eq!(switches(&settings), [Some(true), Some(false)]);
            assert_eq!(
                file(path),
                json!({ "EnableMcpServer": true, "EnableNodeMode": false, "Theme": { "a": [1.5] } })
            );
            // What is changed afterwards stays so.
            let mut settings = Settings::load(path).unwrap();
            settings.set(BRIDGE, true).unwrap();
            settings.save(path).unwrap();
            assert_eq!(switches(&Settings::load(path).unwrap()), [Some(true), Some(true)]);
        });
        in_folder("legacy-off", Some(r#"{"McpOnlyMode":false}"#), |path| {
            assert_eq!(Settings::load(path).unwrap(), Settings::default());
            assert_eq!(file(path), json!({}));
        });
    }

    #[test]
    fn what_cannot_be_read_is_said_and_left_alone() {
        for (content, expected) in [("{", "not a JSON object"), ("[]", "not a JSON object"), ("", "not a JSON object")]
        {
            in_folder("malformed", Some(content), |path| {
                let error = Settings::load(path).unwrap_err().to_string();
                assert!(error.contains(expected) && error.contains("settings.json"), "{error}");
                assert_eq!(fs::read_to_string(path).unwrap(), content);
            });
        }
        in_folder("legacy-type", Some(r#"{"McpOnlyMode":"yes"}"#), |path| {
            let error = Settings::load(path).unwrap_err().to_string();
            assert!(error.contains("McpOnlyMode must be true or false"), "{error}");
            assert_eq!(file(path), json!({ "McpOnlyMode": "yes" }));
        });
        in_folder("long", Some(&" ".repeat(2 << 20)), |path| {
            assert!(Settings::load(path).unwrap_err().to_string().contains("the limit is 1048576"));
        });
        in_folder("type", Some(r#"{"NodeTtsEnabled":1}"#), |path| {
            let error = Settings::load(path).unwrap_err().to_string();
            assert!(error.contains("NodeTtsEnabled must be true or false"), "{error}");
        });
        let error = Settings::default().set("Nonsense", true).unwrap_err().to_string();
        assert!(error.contains("no setting Nonsense") && error.contains("NodeScreenEnabled"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn only_its_owner_can_read_it() {
        use std::os::unix::fs::PermissionsExt;
        in_folder("mode", None, |path| {
            Settings::default().save(path).unwrap();
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        });
    }
}
