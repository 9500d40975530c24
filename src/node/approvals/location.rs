//! Where the policy file is.

use std::path::{Path, PathBuf};

/// The file's name.
pub const FILE_NAME: &str = "exec-approvals.json";

/// Where the policy file is, and where it was before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The file.
    pub path: PathBuf,
    /// A file that is moved to `path` if there is none yet.
    pub legacy: Option<PathBuf>,
}

impl Location {
    /// The file in this folder.
    pub fn in_folder(folder: &Path) -> Self {
        Location { path: absolute(folder).join(FILE_NAME), legacy: None }
    }

    /// The file in the node's folder of data, unless `OPENCLAW_STATE_DIR` names another folder; then one in the former
    /// is moved to the latter. `~` is `OPENCLAW_HOME` if that is set, else the user's home. Blank variables count as
    /// absent.
    pub fn new(data_folder: &Path, env: impl Fn(&str) -> Option<String>) -> Self {
        let own = Self::in_folder(data_folder);
        let text = |name: &str| env(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
        let Some(state) = text("OPENCLAW_STATE_DIR") else { return own };
        let user_home = text("HOME").or_else(|| text("USERPROFILE")).map(PathBuf::from).unwrap_or_default();
        let home = text("OPENCLAW_HOME").map(|home| expand(&home, &user_home)).unwrap_or(user_home);
        let path = absolute(&expand(&state, &home)).join(FILE_NAME);
        let legacy = (path != own.path).then_some(own.path);
        Location { path, legacy }
    }
}

fn expand(path: &str, home: &Path) -> PathBuf {
    match path.strip_prefix('~') {
        Some("") => home.to_owned(),
        Some(rest) if rest.starts_with(std::path::is_separator) => home.join(&rest[1..]),
        _ => PathBuf::from(path),
    }
}

fn absolute(path: &Path) -> PathBuf {
    // It fails for an empty path, or where there is no current folder.
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn the_path_follows_the_environment() {
        let location = |pairs: &[(&str, &str)]| {
            let env = |name: &str| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
            let location = Location::new(Path::new("/data"), env);
            let legacy = location.legacy.map(|path| path.display().to_string());
            (location.path.display().to_string(), legacy)
        };
        let own = "/data/exec-approvals.json".to_owned();
        let home = ("HOME", "/h");
        for pairs in [&[][..], &[("OPENCLAW_STATE_DIR", " ")], &[("OPENCLAW_STATE_DIR", "/data/")]] {
            assert_eq!(location(pairs), (own.clone(), None), "{pairs:?}");
        }
        for (pairs, path) in [
            (&[("OPENCLAW_STATE_DIR", "/s")][..], "/s"),
            (&[("OPENCLAW_STATE_DIR", " ~ "), home], "/h"),
            (&[("OPENCLAW_STATE_DIR", "~/.s"), home], "/h/.s"),
            (&[("OPENCLAW_STATE_DIR", "/~/.s"), home], "/~/.s"),
            (&[("OPENCLAW_STATE_DIR", "~/s"), home, ("OPENCLAW_HOME", "/o")], "/o/s"),
            (&[("OPENCLAW_STATE_DIR", "~/s"), home, ("OPENCLAW_HOME", "~/o")], "/h/o/s"),
            (&[("OPENCLAW_STATE_DIR", "~/s"), ("USERPROFILE", "/u")], "/u/s"),
        ] {
            assert_eq!(location(pairs), (format!("{path}/exec-approvals.json"), Some(own.clone())), "{pairs:?}");
        }
        assert!(Path::new(&location(&[("OPENCLAW_STATE_DIR", "relative")]).0).is_absolute());
    }
}
