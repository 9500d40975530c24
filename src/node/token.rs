//! The file in which the local MCP server's token is kept, so that whoever may read it may call.
//!
//! It is made when the server first starts, lasts until it is reset, and is never made anew because it cannot be
//! read: that would lock out every client that has it. The desktop app's own file begins with a byte order mark.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use super::private_file::{self, clean_up, random};
use crate::auth::Token;

/// The file's name.
pub const FILE_NAME: &str = "mcp-token.txt";
/// The most bytes of the file.
const MAX_FILE_BYTES: u64 = 4096;
/// A token has so many random bytes.
const TOKEN_BYTES: usize = 32;

/// Which installation of the app is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identity {
    /// The one that people use.
    Release,
    /// The one that is being worked on.
    Dev,
}

impl Identity {
    /// The identity of this name.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "release" => Some(Identity::Release),
            "dev" => Some(Identity::Dev),
            _ => None,
        }
    }

    fn folder(self) -> &'static str {
        match self {
            Identity::Release => "OpenClawTray",
            Identity::Dev => "OpenClawTray-Dev",
        }
    }
}

/// Where the token file is, from the environment that `env` reads: in the node's [`folder`].
pub fn path(identity: Identity, env: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    folder(identity, env).map(|folder| folder.join(FILE_NAME))
}

/// The folder of the node's files, from the environment that `env` reads. Blank variables count as absent.
///
/// `OPENCLAW_TRAY_DATA_DIR` is the folder itself, and wins over everything; `OPENCLAW_TRAY_APPDATA_DIR` stands in for
/// the user's folder of settings. `None` if the user has no such folder.
pub fn folder(identity: Identity, env: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let folder = |name: &str| env(name).filter(|value| !value.trim().is_empty()).map(PathBuf::from);
    if let Some(data) = folder("OPENCLAW_TRAY_DATA_DIR") {
        return Some(data);
    }
    let settings = folder("OPENCLAW_TRAY_APPDATA_DIR").or_else(|| {
        if cfg!(windows) {
            folder("APPDATA")
        } else {
            // A relative XDG_CONFIG_HOME is to be ignored (XDG Base Directory Specification).
            let config = folder("XDG_CONFIG_HOME").filter(|config| config.is_absolute());
            config.or_else(|| Some(folder("HOME")?.join(".config")))
        }
    })?;
    Some(settings.join(identity.folder()))
}

/// The token in the file; `None` if it is missing or blank.
///
/// # Errors
/// If the file is there and cannot be read.
pub fn load(path: &Path) -> io::Result<Option<Token>> {
    let Some(text) = private_file::read(path, MAX_FILE_BYTES)? else { return Ok(None) };
    let token = text.trim_start_matches('\u{feff}').trim();
    Ok((!token.is_empty()).then(|| Token::new(token)))
}

/// The token in the file, which is made if it is missing or blank. Two that make it at once get one token.
///
/// # Errors
/// If the file can be neither read nor made.
pub fn load_or_create(path: &Path) -> io::Result<Token> {
    if let Some(token) = load(path)? {
        return Ok(token);
    }
    let (token, temporary) = stage(path)?;
    // Unlike a rename, a link does not replace what another process has put there meanwhile.
    let placed = match fs::hard_link(&temporary, path) {
        Ok(()) => Ok(token),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => match load(path) {
            Ok(Some(others)) => Ok(others),
            Ok(None) => return replace(path, token, &temporary),
            Err(error) => Err(error),
        },
        // Not every file system has links.
        Err(_) => return replace(path, token, &temporary),
    };
    clean_up(&temporary);
    placed
}

/// Puts a new token into the file.
///
/// # Errors
/// If the file cannot be made.
pub fn reset(path: &Path) -> io::Result<Token> {
    let (token, temporary) = stage(path)?;
    replace(path, token, &temporary)
}

fn replace(path: &Path, token: Token, temporary: &Path) -> io::Result<Token> {
    private_file::put(temporary, path).map(|()| token)
}

/// What is wrong with the file's permissions, if anything is.
pub fn looseness(path: &Path) -> Option<String> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let file = fs::metadata(path).ok()?;
        // Only Linux says without a call into C who we are.
        let user = fs::metadata("/proc/self").ok().map(|own| own.uid());
        if user.is_some_and(|user| user != file.uid()) {
            return Some("the token file belongs to another user".to_owned());
        }
        if file.mode() & 0o077 != 0 {
            return Some(format!("the token file can be read by other users (mode {:o})", file.mode() & 0o777));
        }
    }
    #[cfg(not(unix))]
    let _what_the_folder_grants = path;
    None
}

/// Writes a new token to a file beside `path`.
fn stage(path: &Path) -> io::Result<(Token, PathBuf)> {
    let token = random::<TOKEN_BYTES>()?;
    let staged = private_file::stage(path, token.as_bytes())?;
    Ok((Token::new(token), staged))
}

/// A token file that is looked at again at every request, so that a reset holds from the next one on.
#[derive(Debug)]
pub struct Watched {
    path: PathBuf,
    seen: Mutex<Stamp>,
}

/// What tells one state of a file from another: two writes within one tick of the clock differ in their file's number.
type Stamp = Option<(SystemTime, u64, i64)>;

impl Watched {
    /// Watches a file from its present state on.
    pub fn new(path: PathBuf) -> Self {
        let seen = Mutex::new(stamp(&path));
        Watched { path, seen }
    }

    /// The token, if the file has changed since the last look and holds one.
    pub fn changed(&self) -> Option<Token> {
        let now = stamp(&self.path);
        {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            if now.is_none() || *seen == now {
                return None;
            }
            *seen = now;
        }
        match load(&self.path) {
            Ok(token) => token,
            Err(error) => {
                tracing::warn!(%error, "the token file has changed and cannot be read; the old token stays valid");
                None
            }
        }
    }
}

fn stamp(path: &Path) -> Stamp {
    let file = fs::metadata(path).ok()?;
    #[cfg(unix)]
    let (number, changed) = {
        use std::os::unix::fs::MetadataExt;
        (file.ino(), file.ctime_nsec())
    };
    #[cfg(not(unix))]
    let (number, changed) = (file.len(), 0);
    Some((file.modified().ok()?, number, changed))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of one test, removed at its end.
    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Self {
            let folder = std::env::temp_dir().join(format!("openclaw-token-{}", random::<9>().unwrap()));
            fs::create_dir(&folder).unwrap();
            Folder(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn the_path_follows_the_environment() {
        let path = |identity, pairs: &[(&str, &str)]| {
            let env = |name: &str| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
            super::path(identity, env).map(|path| path.display().to_string().replace('\\', "/"))
        };
        let appdata = ("OPENCLAW_TRAY_APPDATA_DIR", "/a");
        let data = ("OPENCLAW_TRAY_DATA_DIR", "/d");
        assert_eq!(path(Identity::Dev, &[appdata, data]).unwrap(), "/d/mcp-token.txt");
        assert_eq!(path(Identity::Dev, &[appdata]).unwrap(), "/a/OpenClawTray-Dev/mcp-token.txt");
        assert_eq!(path(Identity::Release, &[appdata, (data.0, " ")]).unwrap(), "/a/OpenClawTray/mcp-token.txt");
        assert_eq!(path(Identity::Release, &[]), None);
        if cfg!(not(windows)) {
            let home = ("HOME", "/h");
            assert_eq!(path(Identity::Release, &[home]).unwrap(), "/h/.config/OpenClawTray/mcp-token.txt");
            let xdg = path(Identity::Release, &[home, ("XDG_CONFIG_HOME", "/x")]);
            assert_eq!(xdg.unwrap(), "/x/OpenClawTray/mcp-token.txt");
            let relative = path(Identity::Release, &[home, ("XDG_CONFIG_HOME", "x")]);
            assert_eq!(relative.unwrap(), "/h/.config/OpenClawTray/mcp-token.txt");
        }
    }

    #[test]
    fn a_token_is_made_once_and_lasts_until_it_is_reset() {
        let folder = Folder::new();
        let path = folder.0.join("new/deep").join(FILE_NAME);
        assert!(load(&path).unwrap().is_none());
        let token = load_or_create(&path).unwrap();
        assert_eq!(token.expose().len(), 43);
        assert_eq!(fs::read_to_string(&path).unwrap(), token.expose());
        assert_eq!(load_or_create(&path).unwrap().expose(), token.expose());
        let next = reset(&path).unwrap();
        assert_ne!(next.expose(), token.expose());
        assert_eq!(load(&path).unwrap().unwrap().expose(), next.expose());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left behind");
        assert!(reset(Path::new("")).is_err());
    }

    #[test]
    fn a_file_is_read_as_the_desktop_app_writes_it() {
        let folder = Folder::new();
        let path = folder.0.join(FILE_NAME);
        fs::write(&path, "\u{feff} any-text \r\n").unwrap();
        assert_eq!(load_or_create(&path).unwrap().expose(), "any-text");
        fs::write(&path, "\u{feff} \n").unwrap();
        assert!(load(&path).unwrap().is_none());
        assert_eq!(load_or_create(&path).unwrap().expose().len(), 43);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_never_made_anew() {
        let folder = Folder::new();
        let path = folder.0.join(FILE_NAME);
        fs::write(&path, b"\xff\xfe").unwrap();
        assert!(load_or_create(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"\xff\xfe");
        let is_a_folder = folder.0.join("folder");
        fs::create_dir(&is_a_folder).unwrap();
        assert!(load_or_create(&is_a_folder).is_err());
    }

    #[test]
    fn all_who_make_it_at_once_get_one_token() {
        let folder = Folder::new();
        let path = folder.0.join(FILE_NAME);
        let tokens: Vec<String> = std::thread::scope(|scope| {
            let makers: Vec<_> = (0..8).map(|_| scope.spawn(|| load_or_create(&path).unwrap())).collect();
            makers.into_iter().map(|maker| maker.join().unwrap().expose().to_owned()).collect()
        });
        assert!(tokens.iter().all(|token| *token == tokens[0]), "{tokens:?}");
    }

    #[cfg(unix)]
    #[test]
    fn nobody_else_may_read_it() {
        use std::os::unix::fs::PermissionsExt;
        let folder = Folder::new();
        let path = folder.0.join("mine").join(FILE_NAME);
        load_or_create(&path).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        assert_eq!(looseness(&path), None);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(looseness(&path).unwrap().contains("644"));
        reset(&path).unwrap();
        assert_eq!((mode(&path), looseness(&path)), (0o600, None));
        assert_eq!(looseness(&folder.0.join("none")), None);
    }

    #[test]
    fn a_reset_is_seen_at_the_next_look_and_a_loss_is_not_a_change() {
        let folder = Folder::new();
        let path = folder.0.join(FILE_NAME);
        load_or_create(&path).unwrap();
        let watched = Watched::new(path.clone());
        assert!(watched.changed().is_none());
        for _ in 0..3 {
            let token = reset(&path).unwrap();
            assert_eq!(watched.changed().unwrap().expose(), token.expose());
            assert!(watched.changed().is_none());
        }
        fs::write(&path, " ").unwrap();
        assert!(watched.changed().is_none());
        fs::remove_file(&path).unwrap();
        assert!(watched.changed().is_none());
        let token = load_or_create(&path).unwrap();
        assert_eq!(watched.changed().unwrap().expose(), token.expose());
    }

    #[cfg(unix)]
    #[test]
    fn what_is_no_small_file_is_not_read() {
        let folder = Folder::new();
        let path = folder.0.join(FILE_NAME);
        fs::write(&path, "t".repeat(4096)).unwrap();
        assert_eq!(load(&path).unwrap().unwrap().expose().len(), 4096);
        let watched = Watched::new(path.clone());
        fs::write(&path, "t".repeat(4097)).unwrap();
        assert!(load(&path).unwrap_err().to_string().contains("the limit is 4096"));
        assert!(watched.changed().is_none());
        fs::remove_file(&path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert!(load(&path).unwrap_err().to_string().contains("not a file"));
        assert!(watched.changed().is_none(), "and nobody waits for it");
    }

    #[cfg(unix)]
    #[test]
    fn a_token_that_is_written_over_within_one_second_is_seen() {
        let folder = Folder::new();
        let path = folder.0.join(FILE_NAME);
        fs::write(&path, "one").unwrap();
        let then = fs::metadata(&path).unwrap().modified().unwrap();
        let watched = Watched::new(path.clone());
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs::write(&path, "two").unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(then).unwrap();
        assert_eq!(watched.changed().unwrap().expose(), "two");
    }
}
