//! What can be wrong before the first request, in words: each is one sentence with what mends it. And all of it at
//! once, without serving, for `openclaw-mcp-proxy check-config`.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Write};
use std::net::TcpListener;
use std::path::Path;

use super::OperatorError;
use super::config::Examined;
use super::listener::Listen;
use super::state_file::{self, StateFileError};
use super::tenants::{Tenants, TenantsError};
use super::trace::{self, TraceError};
use crate::process;

/// Why the proxy does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A file that the settings name cannot be used, and trying again does not help.
    #[error("{0}")]
    Config(String),
    /// It cannot listen where it should, for now.
    #[error("{0}")]
    Listen(String),
}

impl StartError {
    /// What it means that a server could not be bound.
    pub fn of(listen: &Listen, error: &io::Error) -> Self {
        match error.get_ref() {
            Some(inner) if inner.is::<TenantsError>() || inner.is::<StateFileError>() => {
                StartError::Config(inner.to_string())
            }
            Some(inner) if inner.is::<TraceError>() => StartError::Config(inner.to_string()),
            Some(inner) if inner.is::<OperatorError>() => StartError::Listen(inner.to_string()),
            _ => StartError::Listen(cannot_listen(listen, error)),
        }
    }
}

/// Why an address cannot be listened on.
fn cannot_listen(listen: &Listen, error: &io::Error) -> String {
    let why = match (listen, error.kind()) {
        (Listen::Unix(_), ErrorKind::AddrInUse) => {
            "another program does, or another file is there; set OPENCLAW_PROXY_LISTEN to another path".into()
        }
        (Listen::Unix(_), _) => format!("{error}; set OPENCLAW_PROXY_LISTEN to a path in a folder of the proxy's user"),
        (Listen::Tcp(address), ErrorKind::AddrInUse) => {
            format!("another program does, as 'ss -ltnp sport = :{}' shows; stop it, or set OPENCLAW_PROXY_LISTEN to another port", address.port())
        }
        (_, ErrorKind::AddrNotAvailable) => {
            "this machine has no such address; set OPENCLAW_PROXY_LISTEN to one that it has, or to 127.0.0.1 behind a reverse proxy on it".into()
        }
        (_, ErrorKind::PermissionDenied) => {
            "ports below 1024 need a privilege; set OPENCLAW_PROXY_LISTEN to a port from 1024 on behind a reverse proxy, or give the service AmbientCapabilities=CAP_NET_BIND_SERVICE".into()
        }
        _ => format!("{error}; set OPENCLAW_PROXY_LISTEN to another address"),
    };
    format!("cannot listen on {listen}: {why}.")
}

/// Why the audit log cannot be written.
pub fn cannot_audit(path: &Path, error: &io::Error) -> String {
    format!(
        "OPENCLAW_PROXY_AUDIT_FILE cannot be written: {}: {error}; make its folder, and let the user that the proxy runs as write there.",
        path.display()
    )
}

/// Looks at every setting and at every file that they name, as a start would, and tells what it has found; says whether
/// it would start.
///
/// # Errors
/// If `out` cannot be written.
pub fn check(examined: Examined, out: &mut impl Write) -> io::Result<bool> {
    let Examined { config, mut problems, changed } = examined;
    problems.extend(process::log_filter(&config.log).err());
    problems.extend(Tenants::new(&config).err().map(|error| error.to_string()));
    if let Some(tracing) = &config.tracing {
        problems.extend(trace::open(tracing).err().map(|error| error.to_string()));
    }
    if let Some(path) = &config.state_file {
        problems.extend(state_file::look(path).err().map(|error| error.to_string()));
    }
    if let Some(path) = &config.audit_file {
        problems.extend(can_append(path).err().map(|error| cannot_audit(path, &error)));
    }
    let mut warnings = config.warnings();
    if let Some(address) = config.listen.tcp() {
        match TcpListener::bind(address) {
            Ok(_) => {}
            // The proxy itself, most likely: it is checked before it is started anew.
            Err(error) if error.kind() == ErrorKind::AddrInUse => warnings.push(cannot_listen(&config.listen, &error)),
            Err(error) => problems.push(cannot_listen(&config.listen, &error)),
        }
    }
    if let Some(address) = config.admin_listen
        && let Err(error) = TcpListener::bind(address)
    {
        let is_taken = error.kind() == ErrorKind::AddrInUse;
        let sentence = OperatorError { address, error }.to_string();
        if is_taken { &mut warnings } else { &mut problems }.push(sentence);
    }
    if changed.is_empty() {
        writeln!(out, "Every setting has its default.")?;
    }
    for (name, value) in changed {
        // On one line, whatever is in it.
        writeln!(out, "{name}={}", value.as_deref().map_or("(set)".into(), |value| value.escape_debug().to_string()))?;
    }
    for warning in &warnings {
        writeln!(out, "warning: {warning}")?;
    }
    for problem in &problems {
        writeln!(out, "problem: {problem}")?;
    }
    writeln!(out, "{}", if problems.is_empty() { "The proxy would start." } else { "The proxy would not start." })?;
    out.flush()?;
    Ok(problems.is_empty())
}

/// Whether a file can be appended to. One that is not there yet is not there afterwards: it might belong to another
/// user than the proxy's.
fn can_append(path: &Path) -> io::Result<()> {
    match OpenOptions::new().append(true).open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            OpenOptions::new().append(true).create_new(true).open(path)?;
            std::fs::remove_file(path)
        }
        result => result.map(drop),
    }
}
