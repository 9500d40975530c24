//! Reading and writing the policy file.
//!
//! A file that is not wholly understood, or that somebody else could have put there, counts as one that forbids
//! everything, and is never written. Several processes may write at once: each holds a lock from reading to
//! writing, and puts a new file in place of the old one in one step, so that a reader sees either.

use std::fs::{self, TryLockError};
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::disk::{self, MAX_BYTES, with_suffix};
use super::location::Location;
use super::policy::{EVERY_AGENT, Entry, File, Policy, agent_key};
use crate::node::private_file;

/// How long a change waits for another process's.
const LOCK_WAIT: Duration = Duration::from_secs(5);
/// How long noting that an entry was used waits for it: nobody relies on that.
const NOTE_WAIT: Duration = Duration::from_millis(200);
/// How often it is looked whether the lock is free.
const LOCK_POLL: Duration = Duration::from_millis(10);
/// An entry that was used again so soon keeps the time it has. Each write changes the file's hash, and a client that
/// wants to change the policy needs the one that is current.
const NOTE_EVERY: Duration = Duration::from_secs(60);

/// The file, at its place.
#[derive(Debug, Clone)]
pub struct Store {
    location: Location,
}

/// What there is to read.
#[derive(Debug, Clone, PartialEq)]
pub enum Loaded {
    /// There is no file.
    Missing,
    /// A policy.
    Policy {
        /// What the file says.
        file: Box<File>,
        /// The hash of its bytes.
        hash: String,
    },
    /// A file that is not used, and why.
    Unusable(&'static str),
}

/// Why the file was not written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It is not to be touched.
    #[error("The policy file is not usable: {0}. Everything is refused, and the file is left as it is.")]
    Unusable(&'static str),
    /// It has changed meanwhile.
    #[error("exec approvals changed; reload and retry")]
    Stale,
    /// The change is not permitted.
    #[error("{0}")]
    Refused(String),
    /// Another process holds the lock.
    #[error("The policy file is being written by another process.")]
    Busy,
    /// The file system says no.
    #[error("The policy file cannot be written: {0}.")]
    Io(#[from] io::Error),
}

impl Loaded {
    /// The hash that a change must name.
    fn hash(&self) -> String {
        match self {
            Loaded::Policy { hash, .. } => hash.clone(),
            _ => format!("missing:{}", hash_of(b"")),
        }
    }

    /// What the file says; the usual, if there is none.
    ///
    /// # Errors
    /// If it is not used.
    fn into_file(self) -> Result<File, StoreError> {
        match self {
            Loaded::Missing => Ok(File::default()),
            Loaded::Policy { file, .. } => Ok(*file),
            Loaded::Unusable(why) => Err(StoreError::Unusable(why)),
        }
    }
}

impl Store {
    /// The file at this place. Nothing is read yet.
    pub fn new(location: Location) -> Self {
        Store { location }
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.location.path
    }

    /// What is in force for an agent now.
    pub fn policy(&self, agent: Option<&str>) -> Policy {
        match self.load() {
            Loaded::Missing => Policy::default(),
            Loaded::Policy { file, .. } => file.policy(Some(agent_key(agent))),
            Loaded::Unusable(why) => {
                tracing::warn!(file = %self.path().display(), why, "the approvals are not usable, so nothing may run");
                Policy::closed()
            }
        }
    }

    /// Reads the file. One at the old place is moved first.
    pub fn load(&self) -> Loaded {
        match read(self.path()) {
            Loaded::Missing if self.has_legacy() => match self.lock(LOCK_WAIT).and_then(|_lock| self.migrate()) {
                Ok(()) => read(self.path()),
                Err(error) => {
                    tracing::warn!(%error, "the approvals cannot be moved to where they belong");
                    Loaded::Unusable("the one at the old place cannot be moved here")
                }
            },
            loaded => loaded,
        }
    }

    fn has_legacy(&self) -> bool {
        self.location.legacy.as_deref().is_some_and(|legacy| !matches!(read(legacy), Loaded::Missing))
    }

    /// Moves the file from the old place, under the lock.
    fn migrate(&self) -> Result<(), StoreError> {
        let Some(legacy) = &self.location.legacy else { return Ok(()) };
        // Another process may have moved it while this one waited for the lock.
        if !matches!(read(self.path()), Loaded::Missing) {
            return Ok(());
        }
        let Some(bytes) = disk::read(legacy).map_err(StoreError::Unusable)? else { return Ok(()) };
        File::parse(&bytes).map_err(StoreError::Unusable)?;
        disk::write(self.path(), &bytes)?;
        let mut archive = with_suffix(legacy, ".migrated");
        if archive.exists() {
            archive = with_suffix(legacy, &format!(".migrated-{}", private_file::random::<9>()?));
        }
        // The file is at its new place already, and that is the one that counts.
        if let Err(error) = fs::rename(legacy, &archive) {
            tracing::warn!(%error, file = %legacy.display(), "an old file of approvals is left behind");
        }
        Ok(())
    }

    /// The file as clients see it. It is made if it is missing.
    ///
    /// # Errors
    /// [`StoreError`] if it can be neither read nor made.
    pub fn snapshot(&self) -> Result<Value, StoreError> {
        let (file, hash) = match self.load() {
            Loaded::Policy { file, hash } => (*file, hash),
            Loaded::Missing => self.change(LOCK_WAIT, |loaded| {
                let is_missing = loaded == Loaded::Missing;
                Ok((loaded.into_file()?, is_missing))
            })?,
            Loaded::Unusable(why) => return Err(StoreError::Unusable(why)),
        };
        Ok(self.shown(&file, &hash))
    }

    /// Puts another policy in place of the one with `base_hash`. What is written is what `revise` makes of the one
    /// that there is.
    ///
    /// # Errors
    /// [`StoreError`], and nothing is written.
    pub fn replace(
        &self,
        base_hash: &str,
        revise: impl FnOnce(&File) -> Result<File, String>,
    ) -> Result<Value, StoreError> {
        let (file, hash) = self.change(LOCK_WAIT, |loaded| {
            let is_current = loaded.hash() == base_hash.trim();
            let current = loaded.into_file()?;
            if !is_current {
                return Err(StoreError::Stale);
            }
            Ok((revise(&current).map_err(StoreError::Refused)?, true))
        })?;
        Ok(self.shown(&file, &hash))
    }

    /// Changes the policy. `edit` says whether there is anything to write.
    ///
    /// # Errors
    /// [`StoreError`], and nothing is written.
    pub fn update(&self, edit: impl FnOnce(&mut File) -> bool) -> Result<(), StoreError> {
        self.edit(LOCK_WAIT, edit)
    }

    fn edit(&self, wait: Duration, edit: impl FnOnce(&mut File) -> bool) -> Result<(), StoreError> {
        self.change(wait, |loaded| {
            let mut file = loaded.into_file()?;
            let is_changed = edit(&mut file);
            Ok((file, is_changed))
        })
        .map(drop)
    }

    /// Notes that an entry was relied on, if that can be done soon.
    pub fn note_use(&self, agent: Option<&str>, used: &Entry, program: &Path) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let is_recent = |entry: &Entry| {
            let last = entry.last_used_at.as_ref().and_then(serde_json::Number::as_f64).unwrap_or_default();
            (0.0..NOTE_EVERY.as_millis() as f64).contains(&(now.as_millis() as f64 - last))
        };
        if is_recent(used) {
            return;
        }
        let noted = self.edit(NOTE_WAIT, |file| {
            let mut is_changed = false;
            for agent in [agent_key(agent), EVERY_AGENT] {
                let entries = file.agents.as_mut().and_then(|agents| agents.get_mut(agent)?.allowlist.as_mut());
                let same = entries.into_iter().flatten().filter(|entry| entry.key() == used.key());
                for entry in same.filter(|entry| !is_recent(entry)) {
                    entry.last_used_at = Some((now.as_millis() as u64).into());
                    entry.last_resolved_path = Some(program.display().to_string());
                    is_changed = true;
                }
            }
            is_changed
        });
        if let Err(error) = noted {
            tracing::debug!(%error, "the use of an approval is not noted");
        }
    }

    fn shown(&self, file: &File, hash: &str) -> Value {
        json!({ "path": self.path().display().to_string(), "exists": true, "hash": hash, "file": file.for_clients() })
    }

    /// Reads, lets `change` say what is to be there and whether that must be written, and writes it, while no other
    /// process does. Gives what is there then, with its hash.
    fn change(
        &self,
        wait: Duration,
        change: impl FnOnce(Loaded) -> Result<(File, bool), StoreError>,
    ) -> Result<(File, String), StoreError> {
        let _lock = self.lock(wait)?;
        self.migrate()?;
        let loaded = read(self.path());
        let hash = loaded.hash();
        let (file, is_changed) = change(loaded)?;
        if !is_changed {
            return Ok((file, hash));
        }
        let text = file.to_text();
        if text.len() as u64 > MAX_BYTES {
            return Err(StoreError::Refused("The policy would be too long to be read.".to_owned()));
        }
        disk::write(self.path(), text.as_bytes())?;
        Ok((file, hash_of(text.as_bytes())))
    }

    /// The lock, which is free again when the file is dropped, or its process ends.
    fn lock(&self, wait: Duration) -> Result<fs::File, StoreError> {
        let path = with_suffix(self.path(), ".lock");
        if let Some(folder) = path.parent() {
            private_file::make_folder(folder)?;
        }
        let lock = disk::private().create(true).truncate(false).open(path)?;
        let until = Instant::now() + wait;
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(lock),
                Err(TryLockError::WouldBlock) if Instant::now() < until => thread::sleep(LOCK_POLL),
                Err(TryLockError::WouldBlock) => return Err(StoreError::Busy),
                Err(TryLockError::Error(error)) => return Err(error.into()),
            }
        }
    }
}

/// Reads the policy, if there is nothing suspicious about its file.
fn read(path: &Path) -> Loaded {
    match disk::read(path) {
        Ok(None) => Loaded::Missing,
        Ok(Some(bytes)) => match File::parse(&bytes) {
            Ok(file) => Loaded::Policy { file: Box::new(file), hash: hash_of(&bytes) },
            Err(why) => Loaded::Unusable(why),
        },
        Err(why) => Loaded::Unusable(why),
    }
}

fn hash_of(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::approvals::Folder;
    use crate::node::approvals::location::FILE_NAME;
    use crate::node::approvals::policy::{Ask, Security};

    fn store(folder: &Folder) -> Store {
        Store::new(Location::in_folder(&folder.0.join("data")))
    }

    fn list(store: &Store, pattern: &str) {
        store
            .update(|file| {
                let entry = Entry { pattern: pattern.to_owned(), ..Entry::default() };
                file.rules_mut("main").allowlist.get_or_insert_default().push(entry);
                true
            })
            .unwrap();
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_made_when_it_is_asked_for_and_not_before() {
        let folder = Folder::new();
        let store = store(&folder);
        assert_eq!((store.load(), store.policy(None)), (Loaded::Missing, Policy::default()));
        assert_eq!(store.load().hash(), "missing:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert!(!folder.0.join("data").exists());
        let first = store.snapshot().unwrap();
        assert_eq!(first["path"], store.path().display().to_string());
        assert_eq!(
            (first["exists"].as_bool(), &first["file"]["defaults"]["askFallback"], first.get("baseHash")),
            (Some(true), &json!("deny"), None)
        );
        assert_eq!(first["hash"], hash_of(&fs::read(store.path()).unwrap()));
        assert_eq!(store.snapshot().unwrap(), first, "and then left as it is");
        assert_eq!(store.policy(None), Policy::default());
    }

    #[test]
    fn a_change_needs_the_hash_of_what_it_changes() {
        let folder = Folder::new();
        let store = store(&folder);
        let tighten = |file: &File| {
            let mut file = file.clone();
            file.rules_mut("main").security = Some(Security::Deny);
            Ok(file)
        };
        let missing = store.load().hash();
        for stale in ["", "0", &hash_of(b"")] {
            assert!(matches!(store.replace(stale, tighten), Err(StoreError::Stale)));
        }
        assert_eq!(store.load(), Loaded::Missing);
        let next = store.replace(&format!(" {missing} "), tighten).unwrap();
        assert_eq!(store.policy(None).security, Security::Deny);
        assert!(matches!(store.replace(&missing, tighten), Err(StoreError::Stale)));
        let before = fs::read(store.path()).unwrap();
        let refused = store.replace(next["hash"].as_str().unwrap(), |_| Err("no".to_owned()));
        assert_eq!(refused.unwrap_err().to_string(), "no");
        assert_eq!(fs::read(store.path()).unwrap(), before);
    }

    #[test]
    fn what_is_malformed_forbids_everything_and_is_never_written() {
        let folder = Folder::new();
        let store = store(&folder);
        fs::create_dir(folder.0.join("data")).unwrap();
        let long = format!("{{\"version\":1,\"x\":\"{}\"}}", "x".repeat(MAX_BYTES as usize));
        for bad in ["", "{", "[]", r#"{"version":2}"#, r#"{"version":1,"defaults":{"ask":1}}"#, &long] {
            fs::write(store.path(), bad).unwrap();
            assert_eq!(store.policy(None), Policy::closed(), "{:.40}", bad);
            assert!(matches!(store.snapshot(), Err(StoreError::Unusable(_))));
            assert!(matches!(store.update(|_| true), Err(StoreError::Unusable(_))));
            let hash = store.load().hash();
            assert!(matches!(store.replace(&hash, |file| Ok(file.clone())), Err(StoreError::Unusable(_))));
            store.note_use(None, &Entry::default(), Path::new("/a"));
            assert_eq!(fs::read_to_string(store.path()).unwrap(), bad);
        }
        fs::remove_file(store.path()).unwrap();
        fs::create_dir(store.path()).unwrap();
        assert_eq!(store.policy(None), Policy::closed());
        assert!(store.update(|_| true).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn what_somebody_else_could_have_put_there_forbids_everything() {
        let folder = Folder::new();
        let store = store(&folder);
        let elsewhere = folder.0.join("elsewhere.json");
        fs::create_dir(folder.0.join("data")).unwrap();
        fs::write(&elsewhere, r#"{"version":1,"defaults":{"security":"full"}}"#).unwrap();
        std::os::unix::fs::symlink(&elsewhere, store.path()).unwrap();
        assert_eq!(store.policy(None), Policy::closed());
        assert!(store.update(|_| true).is_err());
        fs::remove_file(store.path()).unwrap();
        fs::rename(&elsewhere, store.path()).unwrap();
        assert_eq!(store.policy(None).security, Security::Full);
    }

    #[cfg(unix)]
    #[test]
    fn what_is_written_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let folder = Folder::new();
        let store = store(&folder);
        list(&store, "/a");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(store.path()), mode(store.path().parent().unwrap())), (0o600, 0o700));
        assert_eq!(names(store.path().parent().unwrap()), [FILE_NAME, &format!("{FILE_NAME}.lock")]);
    }

    #[test]
    fn no_change_is_lost_when_many_write_at_once() {
        let folder = Folder::new();
        let store = store(&folder);
        thread::scope(|scope| {
            for writer in 0..8 {
                let store = &store;
                scope.spawn(move || {
                    for number in 0..5 {
                        list(store, &format!("/{writer}/{number}"));
                    }
                });
            }
        });
        assert_eq!(store.policy(None).allowlist.len(), 40);
    }

    #[test]
    fn who_waits_too_long_for_the_lock_changes_nothing() {
        let folder = Folder::new();
        let store = store(&folder);
        let lock = store.lock(LOCK_WAIT).unwrap();
        assert!(matches!(store.edit(Duration::ZERO, |_| true), Err(StoreError::Busy)));
        drop(lock);
        assert!(store.edit(Duration::ZERO, |_| true).is_ok());
    }

    #[test]
    fn the_use_of_an_entry_is_noted_now_and_then() {
        let folder = Folder::new();
        let store = store(&folder);
        list(&store, "/a");
        list(&store, "/b");
        let entry = |at: usize| store.policy(None).allowlist[at].clone();
        store.note_use(None, &entry(0), Path::new("/a"));
        let (first, hash) = (entry(0), store.load().hash());
        assert!(first.last_used_at.as_ref().unwrap().as_u64().unwrap() > 1_700_000_000_000);
        assert_eq!((first.last_resolved_path.as_deref(), &first.last_used_command), (Some("/a"), &None));
        assert_eq!(entry(1).last_used_at, None);
        store.note_use(None, &entry(0), Path::new("/other"));
        assert_eq!((entry(0), store.load().hash()), (first.clone(), hash), "it was used a moment ago");
        let old = first.last_used_at.unwrap().as_u64().unwrap() - 61_000;
        let set_old = |file: &mut File| {
            file.rules_mut("main").allowlist.as_mut().unwrap()[0].last_used_at = Some(old.into());
            true
        };
        store.update(set_old).unwrap();
        store.note_use(Some("main"), &entry(0), Path::new("/other"));
        assert_eq!(entry(0).last_resolved_path.as_deref(), Some("/other"));
        // An entry that is gone does not come back.
        let gone = Entry { pattern: "/gone".into(), ..Entry::default() };
        store.note_use(None, &gone, Path::new("/gone"));
        assert_eq!(store.policy(None).allowlist.len(), 2);
    }

    #[test]
    fn a_file_at_the_old_place_is_moved_once() {
        let folder = Folder::new();
        let (old, new) = (folder.0.join("old").join(FILE_NAME), folder.0.join("new").join(FILE_NAME));
        let store = Store::new(Location { path: new.clone(), legacy: Some(old.clone()) });
        assert_eq!(store.load(), Loaded::Missing);
        fs::create_dir(folder.0.join("old")).unwrap();
        fs::write(&old, "{").unwrap();
        assert_eq!(store.policy(None), Policy::closed(), "what cannot be moved forbids everything");
        assert!(store.snapshot().is_err() && store.update(|_| true).is_err());
        assert!(!new.exists() && old.exists());
        let text = "{ \"version\": 1, \"defaults\": { \"ask\": \"off\" } }\n";
        fs::write(&old, text).unwrap();
        assert_eq!(store.policy(None).ask, Ask::Off);
        assert_eq!((fs::read_to_string(&new).unwrap().as_str(), old.exists()), (text, false));
        // What turns up there later is no concern of ours.
        fs::write(&old, "{").unwrap();
        assert_eq!(store.policy(None).ask, Ask::Off);
        fs::remove_file(&new).unwrap();
        fs::write(&old, text).unwrap();
        assert!(store.snapshot().is_ok());
        let archives = names(&folder.0.join("old"));
        assert!(archives.len() == 2 && archives.iter().all(|name| name.contains(".migrated")), "{archives:?}");
    }
}
