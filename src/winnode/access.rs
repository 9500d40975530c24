//! Which server is called, and with which token.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use reqwest::Url;

use super::args::Args;
use crate::auth::Token;
use crate::node::local_mcp::DEFAULT_PORT;
use crate::node::token::{self, Identity};

/// The server's address, without what should not be in it.
///
/// # Errors
/// A sentence, if the URL that is given cannot be used.
pub fn endpoint(args: &Args, env: impl Fn(&str) -> Option<String>, notes: &mut Vec<String>) -> Result<Url, String> {
    if let Some(given) = &args.mcp_url {
        let url =
            Url::parse(given.trim()).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        let mut url = url.ok_or("--mcp-url must be an absolute http or https URL.")?;
        url.set_fragment(None);
        // Credentials of an http URL are not used; they cannot be refused by one that has a host.
        let _cleared = (url.set_username(""), url.set_password(None));
        return Ok(url);
    }
    let from_env = || {
        let value = env("OPENCLAW_MCP_PORT").filter(|value| !value.trim().is_empty())?;
        let port = value.trim().parse::<u16>().ok().filter(|port| *port > 0);
        if port.is_none() {
            notes.push(format!("OPENCLAW_MCP_PORT is no port from 1 to 65535; {DEFAULT_PORT} is used."));
        }
        port
    };
    let port = args.mcp_port.or_else(from_env).unwrap_or(DEFAULT_PORT);
    Url::parse(&format!("http://127.0.0.1:{port}/")).map_err(|error| error.to_string())
}

/// Whether a URL leads to this machine, by its name alone: DNS may say anything.
pub fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let literal = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    host.eq_ignore_ascii_case("localhost") || literal.is_ok_and(|ip| ip.is_loopback())
}

/// The installation whose token file is read.
///
/// # Errors
/// A sentence that names the flag or the variable.
pub fn identity(args: &Args, env: impl Fn(&str) -> Option<String>) -> Result<Identity, String> {
    let (name, source) = match (&args.identity, env("OPENCLAW_APP_IDENTITY").filter(|name| !name.trim().is_empty())) {
        (Some(name), _) => (name.clone(), "--identity"),
        (None, Some(name)) => (name, "OPENCLAW_APP_IDENTITY"),
        (None, None) => return Ok(Identity::Release),
    };
    Identity::parse(name.trim()).ok_or_else(|| format!("{source} must be 'release' or 'dev'."))
}

/// Where a token comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A flag.
    Flag,
    /// A variable.
    Env,
    /// The file.
    File,
}

impl Source {
    /// What is said of it.
    pub fn label(self) -> &'static str {
        match self {
            Source::Flag => "bearer (--mcp-token)",
            Source::Env => "bearer (OPENCLAW_MCP_TOKEN)",
            Source::File => "bearer (file)",
        }
    }
}

/// The token to send, and where it comes from.
pub type Credential = Option<(Token, Source)>;

/// The token that is to be sent to `url`.
///
/// # Errors
/// A sentence, if the token file is there and cannot be used.
pub fn credential(
    args: &Args,
    identity: Identity,
    url: &Url,
    env: impl Fn(&str) -> Option<String>,
    warnings: &mut Vec<String>,
) -> Result<Credential, String> {
    let from_env = || env("OPENCLAW_MCP_TOKEN").filter(|token| !token.trim().is_empty());
    let found = match (&args.mcp_token, from_env()) {
        (Some(token), _) => Some((Token::new(token.clone()), Source::Flag)),
        (None, Some(token)) => Some((Token::new(token), Source::Env)),
        (None, None) => match token::path(identity, env) {
            Some(path) => from_file(&path, warnings)?.map(|token| (token, Source::File)),
            None => None,
        },
    };
    let Some((token, source)) = found else { return Ok(None) };
    if !is_loopback(url) {
        if source == Source::File {
            warnings.push("the server is not on this machine, so the token of the file is not sent to it.".to_owned());
            return Ok(None);
        }
        warnings.push("the token is sent to a server that is not on this machine.".to_owned());
    }
    if !token.expose().bytes().all(|byte| byte.is_ascii_graphic()) {
        warnings.push("the token holds invalid characters and is not sent.".to_owned());
        return Ok(None);
    }
    Ok(Some((token, source)))
}

fn from_file(path: &Path, warnings: &mut Vec<String>) -> Result<Option<Token>, String> {
    let Some(path) = trusted(path)? else { return Ok(None) };
    let token = token::load(&path).map_err(|error| format!("the token file cannot be read ({}).", error.kind()))?;
    warnings.extend(token.is_some().then(|| token::looseness(&path)).flatten().map(|what| format!("{what}.")));
    Ok(token)
}

/// The real path of a file that stays where it seems to be; `None` if there is none. Whoever can put a link in its
/// place, or in its folder's, could have us send any file's content.
fn trusted(path: &Path) -> Result<Option<PathBuf>, String> {
    let real = |path: &Path| match fs::canonicalize(path) {
        Ok(real) => Ok(Some(real)),
        Err(error) if error.kind() == ErrorKind::NotFound && fs::symlink_metadata(path).is_err() => Ok(None),
        Err(error) => Err(format!("the token file cannot be read ({}).", error.kind())),
    };
    let path = std::path::absolute(path).map_err(|_| "the token file's path cannot be used.".to_owned())?;
    let Some(folder) = path.parent() else { return Ok(None) };
    let (Some(real_folder), Some(real_file)) = (real(folder)?, real(&path)?) else { return Ok(None) };
    let base = folder.parent().map_or(Ok(None), real)?;
    let is_inside = base.is_none_or(|base| real_folder.starts_with(base)) && real_file.starts_with(&real_folder);
    if is_inside {
        Ok(Some(real_file))
    } else {
        Err("the token file is a link that leads elsewhere; it is not read.".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(mcp_url: Option<&str>, mcp_port: Option<u16>) -> Args {
        Args { mcp_url: mcp_url.map(str::to_owned), mcp_port, ..Args::default() }
    }

    #[test]
    fn the_endpoint_follows_url_port_and_environment() {
        let endpoint = |args: &Args, env: Option<&str>| {
            let mut notes = Vec::new();
            let url = super::endpoint(args, |_| env.map(str::to_owned), &mut notes)?;
            Ok::<_, String>((url.to_string(), notes.len()))
        };
        let ok = |url: &str, notes| Ok((url.to_owned(), notes));
        assert_eq!(endpoint(&args(None, None), None), ok("http://127.0.0.1:8765/", 0));
        assert_eq!(endpoint(&args(None, None), Some("9000")), ok("http://127.0.0.1:9000/", 0));
        assert_eq!(endpoint(&args(None, Some(1)), Some("9000")), ok("http://127.0.0.1:1/", 0));
        assert_eq!(endpoint(&args(Some("https://h:2/x?y#z"), Some(1)), Some("9000")), ok("https://h:2/x?y", 0));
        assert_eq!(endpoint(&args(Some("http://u:p@h"), None), None), ok("http://h/", 0));
        for bad in ["0", "70000", "abc", "-1"] {
            assert_eq!(endpoint(&args(None, None), Some(bad)), ok("http://127.0.0.1:8765/", 1), "{bad}");
        }
        for bad in ["not a url", "htttp://h", "file:///etc/passwd", "ftp://h/", "/x", "http://"] {
            assert!(endpoint(&args(Some(bad), None), None).is_err(), "{bad}");
        }
    }

    #[test]
    fn loopback_is_known_by_its_name() {
        let is_loopback = |url: &str| super::is_loopback(&Url::parse(url).unwrap());
        for local in ["http://localhost:1/", "http://LOCALHOST/", "http://127.9.9.9/", "http://[::1]/", "http://127.1/"]
        {
            assert!(is_loopback(local), "{local}");
        }
        for other in ["http://example.test/", "http://localhost.evil/", "http://127.0.0.1.evil/", "http://10.0.0.1/"] {
            assert!(!is_loopback(other), "{other}");
        }
    }
}
