//! The file of tenants: a token opens what the file says and nothing else, and what is wrong with a file is said
//! without quoting it.

use std::path::PathBuf;
use std::sync::LazyLock;

use openclaw_mcp_proxy::auth::TokenHash;
use openclaw_mcp_proxy::proxy::config::Config;
use openclaw_mcp_proxy::proxy::tenants::{Role, Tenants};

/// One for each process.
static FILE: LazyLock<PathBuf> =
    LazyLock::new(|| std::env::temp_dir().join(format!("openclaw-fuzz-tenants-{}.toml", std::process::id())));

/// Checks one file.
pub fn check(data: &[u8]) {
    std::fs::write(&*FILE, data).expect("there is room for a small file");
    let settings = [
        ("OPENCLAW_PROXY_APP_TOKEN", "own-app"),
        ("OPENCLAW_PROXY_OPENCLAW_TOKEN", "own-client"),
        ("OPENCLAW_PROXY_TENANTS_FILE", FILE.to_str().expect("it is UTF-8")),
    ];
    let config = Config::from_pairs(settings.map(|(name, value)| (name.to_owned(), value.to_owned())));
    let tenants = Tenants::new(&config.expect("these settings are good"));
    std::fs::remove_file(&*FILE).expect("it was there");
    let text = std::str::from_utf8(data);
    match (&tenants, text) {
        (Ok(tenants), Ok(text)) => opened(tenants, text),
        (Ok(_), Err(_)) => panic!("it is no text"),
        (Err(error), text) => {
            let error = error.to_string();
            assert!(error.ends_with('.') && !error.chars().any(char::is_control), "{error:?}");
            text.into_iter().for_each(|text| keeps_quiet(&error, text));
        }
    }
}

fn opened(tenants: &Tenants, text: &str) {
    let file: toml::Table = text.parse().expect("what is accepted is TOML");
    let entries = file.get("tenant").and_then(toml::Value::as_array).map_or(&[][..], Vec::as_slice);
    assert_eq!(tenants.all().len(), entries.len() + 1);
    let own = |role, token: &str| tenants.find(role, Some(token.as_bytes())).map(|tenant| tenant.name().to_owned());
    assert_eq!(own(Role::App, "own-app").as_deref(), Ok("default"));
    assert_eq!(own(Role::Client, "own-client").as_deref(), Ok("default"));
    assert!(own(Role::App, "own-client").is_err() && own(Role::Client, "own-app").is_err());
    assert!(own(Role::App, "").is_err() && tenants.find(Role::Client, None).is_err());
    for entry in entries {
        let name = entry["name"].as_str().expect("a tenant has a name");
        for (member, role, other) in
            [("app_token_sha256", Role::App, Role::Client), ("openclaw_token_sha256", Role::Client, Role::App)]
        {
            let hashes = entry.get(member).and_then(toml::Value::as_array).map_or(&[][..], Vec::as_slice);
            for hash in hashes {
                let hash = TokenHash::parse(hash.as_str().expect("it is a string")).expect("it is a hash");
                let owner = tenants.find_hash(role, Some(&hash)).expect("it opens its side");
                assert_eq!(owner.name(), name);
                assert!(tenants.find_hash(other, Some(&hash)).is_none(), "it does not open the other");
            }
        }
    }
}

/// No string of the file that could be a token, or its hash, is told.
fn keeps_quiet(error: &str, text: &str) {
    // The names of tenants are told.
    let file: Option<toml::Table> = text.parse().ok();
    let entries = file.as_ref().and_then(|file| file.get("tenant")?.as_array()).map_or(&[][..], Vec::as_slice);
    let mut error = error.replace(&*FILE.to_string_lossy(), "");
    for name in entries.iter().filter_map(|entry| entry.get("name")?.as_str()) {
        error = error.replace(name, "");
    }
    let is_part = |c: char| c.is_ascii_alphanumeric() || "-_+/=".contains(c);
    // Values, not the names of members, which may be told.
    for value in text.split(['"', '\'']).skip(1).step_by(2).filter(|value| value.len() >= 24) {
        assert!(!value.chars().all(is_part) || !error.contains(value), "{error}");
    }
}
