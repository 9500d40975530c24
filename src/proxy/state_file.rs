//! The state file: sessions that outlive the process.
//!
//! A journal of lines of JSON: `{"put":{…}}` for a session that is new or has other tools, `{"end":"<id>"}` for one
//! that has ended. Bridges and calls are never in it, and of secrets only their hashes. A task of its own writes what
//! has changed, twice a second at the most; when the file is mostly history it is written anew beside itself and
//! moved into place, so that there is a whole one at any time. Its time of change, set by the sweeper, says when the
//! process last lived.
//!
//! A session that is read back has its whole time to live before it. The numbers of its calls begin where no earlier
//! process can have been, so that no app takes a new call for one that it has answered.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use crate::auth::TokenHash;
use crate::process::file::open_regular;
use crate::protocol::SessionId;
use crate::proxy::ProxyState;
use crate::proxy::registry::{Entry, Owner, Registry};
use crate::proxy::session::Registration;

/// How long changes are gathered before they are written.
const PAUSE: Duration = Duration::from_millis(500);
/// How much of the file may be history before it is written anew, beside as much as is still true.
const HISTORY_BYTES: u64 = 1024 * 1024;

/// Which sessions have changed since the file was last written.
#[derive(Debug, Default)]
pub struct Changes(Mutex<HashSet<SessionId>>);

impl Changes {
    fn ids(&self) -> MutexGuard<'_, HashSet<SessionId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This one is new, has other tools, or has ended.
    pub fn tell(&self, id: SessionId) {
        self.ids().insert(id);
    }

    fn take(&self) -> HashSet<SessionId> {
        std::mem::take(&mut self.ids())
    }
}

/// Why the state file cannot be used: one sentence for the operator.
#[derive(Debug, thiserror::Error)]
#[error("The state file {} {problem}", .path.display())]
pub struct StateFileError {
    path: PathBuf,
    problem: String,
}

/// The file, open and ours.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    /// Held for as long as this lives.
    _lock: File,
    file: File,
    bytes: u64,
    /// The length of each session's line.
    lines: HashMap<SessionId, u64>,
    /// Part of a line may be in the file, so that nothing can be appended.
    is_torn: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Line<'a> {
    #[serde(borrow)]
    Put(Put<'a>),
    End(String),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Put<'a> {
    id: String,
    tenant: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    secret: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mcp_token: Option<String>,
    #[serde(borrow)]
    registration: &'a RawValue,
}

impl StateFileError {
    /// The file cannot be read.
    pub(super) fn unreadable(path: &Path, why: &dyn fmt::Display) -> Self {
        let problem = format!("cannot be read: {why}; see OPENCLAW_PROXY_STATE_FILE.");
        StateFileError { path: path.to_owned(), problem }
    }
}

/// Whether the file could be used, as far as can be seen without touching it.
///
/// # Errors
/// [`StateFileError`].
pub fn look(path: &Path) -> Result<(), StateFileError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let seen = match open_regular(path, OpenOptions::new().read(true).write(true)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => std::fs::read_dir(folder).map(drop),
        seen => seen.map(drop),
    };
    seen.map_err(|error| StateFileError::unreadable(path, &error))
}

impl StateFile {
    /// Opens the file that the settings name, brings its sessions back, and writes it anew.
    ///
    /// # Errors
    /// [`StateFileError`] if it cannot be read or written, or another process has it.
    pub fn open(state: &ProxyState) -> Result<Self, StateFileError> {
        let path = state.config.state_file.as_deref().unwrap_or(Path::new(""));
        let fail = |problem: String| StateFileError { path: path.to_owned(), problem };
        let cannot = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| fail(format!("cannot be {what}: {error}; see OPENCLAW_PROXY_STATE_FILE."))
        };
        let lock = open_regular(&with_suffix(path, "lock"), private().create(true).truncate(false).write(true));
        let lock = lock.map_err(cannot("locked"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(fail("is in use by another proxy; each needs a file of its own.".into()));
            }
            Err(TryLockError::Error(error)) => return Err(cannot("locked")(error)),
        }
        let mut text = Vec::new();
        let mut last_lived = None;
        match open_regular(path, OpenOptions::new().read(true)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            file => {
                let mut file = file.map_err(cannot("read"))?;
                file.read_to_end(&mut text).map_err(cannot("read"))?;
                last_lived = file.metadata().and_then(|file| file.modified()).ok();
            }
        }
        let is_over = last_lived
            .and_then(|at| SystemTime::now().duration_since(at).ok())
            .is_some_and(|since| since > state.config.session_ttl.0);
        let (sessions, is_whole) = read(&text);
        if !is_whole {
            let aside = with_suffix(path, "bad");
            std::fs::copy(path, &aside).map_err(cannot("copied"))?;
            tracing::error!(kept = %aside.display(), "the state file could not be read to its end");
        }
        // Those whose tenant is gone, or that do not fit the settings any more, do not live on.
        let (mut alive, mut dropped) = (0, 0);
        for put in sessions.into_values() {
            let is_back = !is_over && restore(&put, state).is_some();
            alive += usize::from(is_back);
            dropped += usize::from(!is_back);
        }
        tracing::info!(sessions = alive, dropped, "sessions are back");
        let (file, bytes, lines) = write_anew(path, &state.registry).map_err(cannot("written"))?;
        Ok(StateFile { path: path.to_owned(), _lock: lock, file, bytes, lines, is_torn: false })
    }

    /// Writes what has changed.
    fn write(&mut self, changed: HashSet<SessionId>, registry: &Registry) -> io::Result<()> {
        let mut text = Vec::new();
        for id in changed {
            let before = self.lines.remove(&id);
            match registry.get(id, Instant::now()) {
                Some(entry) => {
                    let line = put_line(&entry)?;
                    self.lines.insert(id, line.len() as u64);
                    text.extend_from_slice(&line);
                }
                None if before.is_some() => push_line(&mut text, &Line::End(id.to_string()))?,
                // It came and went in between.
                None => {}
            }
        }
        let alive: u64 = self.lines.values().sum();
        if self.is_torn || self.bytes + text.len() as u64 > 2 * alive + HISTORY_BYTES {
            return self.write_anew(registry);
        }
        if text.is_empty() {
            return Ok(());
        }
        self.is_torn = true;
        self.file.write_all(&text)?;
        self.file.sync_data()?;
        self.is_torn = false;
        self.bytes += text.len() as u64;
        Ok(())
    }

    fn write_anew(&mut self, registry: &Registry) -> io::Result<()> {
        // Until it has worked, nothing may be appended to what is there.
        self.is_torn = true;
        (self.file, self.bytes, self.lines) = write_anew(&self.path, registry)?;
        self.is_torn = false;
        Ok(())
    }

    /// Says that the process lives.
    fn touch(&self) -> io::Result<()> {
        self.file.set_modified(SystemTime::now())
    }
}

/// Writes changes for as long as the process lives, and once more at its end.
pub async fn keep(mut file: StateFile, changes: Arc<Changes>, state: Arc<ProxyState>, stop: CancellationToken) {
    let mut has_failed = false;
    let mut touched = Instant::now();
    loop {
        let is_last = stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await.is_none();
        let changed = changes.take();
        let is_due = touched.elapsed() >= super::registry::SWEEP_INTERVAL;
        if !changed.is_empty() || file.is_torn || is_due || is_last {
            let (registry_of, ids) = (Arc::clone(&state), changed.clone());
            // The disk may take its time.
            let written = tokio::task::spawn_blocking(move || {
                let result = file.write(ids, &registry_of.registry).and_then(|()| file.touch());
                (file, result)
            });
            let Ok((back, result)) = written.await else {
                return tracing::error!("the state file is not written any more");
            };
            (file, touched) = (back, Instant::now());
            if let Err(error) = result {
                changed.into_iter().for_each(|id| changes.tell(id));
                state.records.metrics.state_file_errors.count();
                if !has_failed {
                    tracing::error!(%error, "the state file cannot be written; sessions may be lost with this process");
                }
                has_failed = true;
            } else if std::mem::take(&mut has_failed) {
                tracing::info!("the state file is written again");
            }
        }
        if is_last {
            return;
        }
    }
}

/// The sessions that a journal tells of, and whether all of it could be read. Its last line may be torn: the process
/// was killed while it wrote.
fn read(text: &[u8]) -> (HashMap<String, Put<'_>>, bool) {
    let mut sessions = HashMap::new();
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    for line in text[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        match serde_json::from_slice(line) {
            Ok(Line::Put(put)) => {
                sessions.insert(put.id.clone(), put);
            }
            Ok(Line::End(id)) => {
                sessions.remove(&id);
            }
            Err(_) => return (sessions, false),
        }
    }
    (sessions, true)
}

fn restore(put: &Put<'_>, state: &ProxyState) -> Option<()> {
    let id = SessionId::parse(&put.id)?;
    let tenant = state.tenants.named(&put.tenant)?;
    let hash = |hex: &Option<String>| match hex {
        None => Some(None),
        // One that cannot be read must not turn into none.
        Some(hex) => TokenHash::parse(hex).map(Some),
    };
    let owner = Owner { tenant, secret: hash(&put.secret)?, mcp_token: hash(&put.mcp_token)? };
    let mut limits = state.config.tool_limits();
    // As rendered, a definition may be somewhat longer than it was sent.
    limits.tool_bytes = limits.tool_bytes.saturating_mul(2);
    limits.tools_bytes = limits.tools_bytes.saturating_mul(2);
    let registration = Registration::parse(put.registration.get(), &limits).ok()?;
    state.registry.restore(id, registration, owner, Instant::now()).ok()
}

fn put_line(entry: &Entry) -> io::Result<Vec<u8>> {
    let registration = RawValue::from_string(entry.session.registration.to_body())?;
    let hex = |hash: &Option<TokenHash>| hash.as_ref().map(TokenHash::to_string);
    let put = Put {
        id: entry.session.id.to_string(),
        tenant: entry.owner.tenant.name().to_owned(),
        secret: hex(&entry.owner.secret),
        mcp_token: hex(&entry.owner.mcp_token),
        registration: &registration,
    };
    let mut text = Vec::new();
    push_line(&mut text, &Line::Put(put))?;
    Ok(text)
}

fn push_line(text: &mut Vec<u8>, line: &Line<'_>) -> io::Result<()> {
    serde_json::to_writer(&mut *text, line)?;
    text.push(b'\n');
    Ok(())
}

/// Writes all sessions beside the file and moves them into its place.
fn write_anew(path: &Path, registry: &Registry) -> io::Result<(File, u64, HashMap<SessionId, u64>)> {
    let mut entries = Vec::new();
    registry.each(|entry| {
        entries.push(entry.clone());
        ControlFlow::Continue(())
    });
    let beside = with_suffix(path, "new");
    let mut file = open_regular(&beside, private().create(true).truncate(true).write(true))?;
    let mut lines = HashMap::with_capacity(entries.len());
    let mut bytes = 0;
    for entry in entries {
        let line = put_line(&entry)?;
        file.write_all(&line)?;
        lines.insert(entry.session.id, line.len() as u64);
        bytes += line.len() as u64;
    }
    file.sync_all()?;
    std::fs::rename(&beside, path)?;
    // The move itself is on the disk once the folder is.
    #[cfg(unix)]
    if let Some(folder) = path.parent() {
        File::open(if folder.as_os_str().is_empty() { Path::new(".") } else { folder })?.sync_all()?;
    }
    Ok((file, bytes, lines))
}

/// A file for its owner alone.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_last_line_is_no_fault_and_a_strange_one_is() {
        let put = |id: &str| format!(r#"{{"put":{{"id":"{id}","tenant":"t","registration":{{"device_id":"d"}}}}}}"#);
        let ids = |text: &str| {
            let (sessions, is_whole) = read(text.as_bytes());
            let mut ids: Vec<String> = sessions.into_keys().collect();
            ids.sort();
            (ids.join(" "), is_whole)
        };
        let (a, b) = (put("a"), put("b"));
        assert_eq!(ids(""), ("".into(), true));
        assert_eq!(ids(&format!("{a}\n{b}\n")), ("a b".into(), true));
        assert_eq!(ids(&format!("{a}\n{b}\n{{\"end\":\"a\"}}\n")), ("b".into(), true));
        for cut in 1..=b.len() {
            assert_eq!(ids(&format!("{a}\n{}", &b[..cut])), ("a".into(), true), "{cut}");
        }
        assert_eq!(ids(&format!("{a}\nnonsense\n{b}\n")), ("a".into(), false));
        assert_eq!(ids(&format!("{a}\n{{\"put\":{{}}}}\n")), ("a".into(), false));
        let (sessions, is_whole) = read(b"\xff\xfe\n");
        assert!(sessions.is_empty() && !is_whole);
    }
}
