//! What a client may change of the policy: it may make it stricter, and nothing else.

use std::collections::{BTreeSet, HashMap};

use serde_json::Value;

use super::policy::{EVERY_AGENT, Entry, File, Key, MAIN_AGENT, Policy, Rules};

/// The policy that a client wants in place of `current`. What it says about entries but which of them remain is not
/// taken over, nor what is none of its business: where another program is asked, and members that are not known here.
///
/// # Errors
/// A sentence that names what would be less strict.
pub fn revise(current: &File, wanted: &File) -> Result<File, String> {
    if wanted.agents().any(|(agent, _)| agent.trim().is_empty()) {
        return Err("An agent's id must not be blank.".to_owned());
    }
    let both: BTreeSet<&str> =
        current.agents().chain(wanted.agents()).map(|(agent, _)| agent).chain([EVERY_AGENT, MAIN_AGENT]).collect();
    let whose = std::iter::once(None).chain(both.into_iter().map(Some));
    for agent in whose {
        compare(&current.policy(agent), &wanted.policy(agent)).map_err(|field| {
            let whose = agent.map_or("the defaults".to_owned(), |agent| format!("agent '{agent}'"));
            format!("Remote exec approval updates cannot make {field} less restrictive for {whose}.")
        })?;
    }
    let agents = wanted.agents().map(|(agent, rules)| {
        let revised = revise_rules(current.rules(agent), rules).ok_or_else(|| {
            format!("Remote exec approval updates cannot add or change allowlist entries of '{agent}'.")
        })?;
        Ok((agent.to_owned(), revised))
    });
    let defaults = wanted.defaults.as_ref().map(|rules| Rules {
        allowlist: None,
        other: current.defaults.as_ref().map(|rules| rules.other.clone()).unwrap_or_default(),
        ..rules.clone()
    });
    Ok(File { agents: Some(agents.collect::<Result<_, String>>()?), defaults, ..current.clone() })
}

/// Whether `wanted` is at least as strict.
///
/// # Errors
/// The setting that is not.
fn compare(current: &Policy, wanted: &Policy) -> Result<(), &'static str> {
    match () {
        () if wanted.security > current.security => Err("security"),
        () if wanted.ask < current.ask => Err("ask"),
        () if wanted.ask_fallback > current.ask_fallback => Err("askFallback"),
        () if wanted.auto_allow_skills && !current.auto_allow_skills => Err("autoAllowSkills"),
        () => Ok(()),
    }
}

/// An agent's rules as they are wanted, with those entries that remain, as they were. `None` if there is one that was
/// not there.
fn revise_rules(current: Option<&Rules>, wanted: &Rules) -> Option<Rules> {
    let listed = current.and_then(|rules| rules.allowlist.as_deref()).unwrap_or_default();
    let listed: HashMap<Key, &Entry> = listed.iter().rev().map(|entry| (entry.key(), entry)).collect();
    let remaining = wanted.allowlist.as_ref().map(|entries| {
        entries.iter().map(|entry| listed.get(&entry.key()).map(|entry| (*entry).clone())).collect::<Option<Vec<_>>>()
    });
    Some(Rules {
        allowlist: match remaining {
            Some(remaining) => Some(remaining?),
            None => None,
        },
        other: current.map(|rules| rules.other.clone()).unwrap_or_default(),
        ..wanted.clone()
    })
}

/// Reads the file that a client wants.
///
/// # Errors
/// A sentence for it.
pub fn parse(file: Option<&Value>) -> Result<File, &'static str> {
    let file = file.filter(|file| file.is_object()).ok_or("exec approvals file required")?;
    if file.get("version") != Some(&super::policy::VERSION.into()) {
        return Err("exec approvals file version 1 required");
    }
    File::from_value(file.clone()).map_err(|_| "Invalid exec approvals file")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn file(value: Value) -> File {
        parse(Some(&value)).unwrap()
    }

    fn current() -> File {
        file(json!({ "version": 1, "x": 1, "socket": { "path": "/s", "token": "secret" },
            "defaults": { "security": "allowlist", "ask": "on-miss", "askFallback": "deny" },
            "agents": {
                "*": { "allowlist": [{ "id": "w", "pattern": "/w" }] },
                "main": { "allowlist": [{ "id": "1", "pattern": "/a", "lastUsedAt": 1 },
                    { "id": "2", "pattern": "/a", "argPattern": "xy", "source": "z" }] },
                "open": { "security": "full", "ask": "off", "askFallback": "full", "autoAllowSkills": true, "y": 1 } } }))
    }

    /// What becomes of a change of what there is.
    fn change(edit: impl FnOnce(&mut Value)) -> Result<File, String> {
        let mut wanted = current().for_clients();
        edit(&mut wanted);
        revise(&current(), &file(wanted))
    }

    #[test]
    fn what_is_read_can_be_written_and_changes_nothing() {
        let mut same = current();
        same.defaults.as_mut().unwrap().auto_allow_skills = Some(false);
        assert_eq!(change(|_| {}), Ok(same));
    }

    #[test]
    fn it_can_be_made_stricter() {
        let revised = change(|file| {
            file["defaults"] = json!({ "security": "deny", "ask": "always", "askFallback": "deny" });
            file["agents"]["open"] = json!({ "security": "full", "ask": "always", "askFallback": "deny" });
            file["agents"]["main"]["allowlist"] = json!([{ "id": "forged", "pattern": " /A ", "commandText": "x" }]);
            file["agents"]["*"] = json!({});
            file["agents"]["new"] = json!({ "security": "deny" });
            file["socket"] = json!({ "path": "/evil", "token": "t" });
        })
        .unwrap();
        assert_eq!((&revised.socket, &revised.other), (&current().socket, &current().other));
        assert_eq!(revised.policy(Some("open")).ask, super::super::policy::Ask::Always);
        let main = &revised.rules("main").unwrap().allowlist;
        assert_eq!(main.as_deref(), Some(&current().rules("main").unwrap().allowlist.as_ref().unwrap()[..1]));
        assert_eq!(revised.rules("open").unwrap().other, current().rules("open").unwrap().other);
        assert!(change(|file| file["agents"] = json!({ "open": { "security": "deny" } })).is_ok());
    }

    #[test]
    fn nothing_can_be_made_less_strict() {
        for (pointer, value, field) in [
            ("/defaults/security", json!("full"), "security"),
            ("/defaults/security", json!(null), ""),
            ("/defaults/ask", json!("off"), "ask"),
            ("/defaults/askFallback", json!("allowlist"), "askFallback"),
            ("/defaults/askFallback", json!("off"), "askFallback"),
            ("/defaults/autoAllowSkills", json!(true), "autoAllowSkills"),
            ("/agents/*/security", json!("full"), "security"),
            ("/agents/*/ask", json!("off"), "ask"),
            ("/agents/main/security", json!("full"), "security"),
            ("/agents/main/ask", json!("off"), "ask"),
            ("/agents/main/askFallback", json!("full"), "askFallback"),
            ("/agents/main/autoAllowSkills", json!(true), "autoAllowSkills"),
            ("/agents/new", json!({ "security": "full" }), "security"),
            ("/agents/default", json!({ "ask": "off" }), "ask"),
        ] {
            let result = change(|file| {
                let (parent, name) = pointer.rsplit_once('/').unwrap();
                file.pointer_mut(parent).unwrap()[name] = value;
            });
            let error = result.err().unwrap_or_default();
            let expected = format!("cannot make {field} less restrictive for");
            assert!(if field.is_empty() { error.is_empty() } else { error.contains(&expected) }, "{pointer}: {error}");
        }
        // An agent that had rules of its own falls back to those of all.
        let mut strict = current();
        strict.rules_mut("main").security = Some(super::super::policy::Security::Deny);
        let error = revise(&strict, &current()).unwrap_err();
        assert!(error.contains("security less restrictive for agent 'main'"), "{error}");
        strict.agents.as_mut().unwrap().remove("open");
        assert!(revise(&current(), &strict).is_ok());
        assert!(change(|file| file["agents"][" "] = json!({})).unwrap_err().contains("blank"));
    }

    #[test]
    fn no_entry_can_be_added_or_changed() {
        for entry in [
            json!({ "pattern": "*" }),
            json!({ "pattern": "*.*" }),
            json!({ "pattern": "cmd *" }),
            json!({ "pattern": "C:\\\\Windows\\\\System32\\\\cmd.exe" }),
            json!({ "pattern": "" }),
            json!({}),
            json!({ "id": "w", "pattern": "/w" }),
            json!({ "pattern": "/a", "argPattern": "XY", "source": "z" }),
            json!({ "pattern": "/a", "source": "z" }),
            json!({ "pattern": "/a", "argPattern": "xy" }),
            json!({ "pattern": "/a", "argPattern": "x", "source": "yz" }),
            json!({ "pattern": "/axy", "argPattern": "", "source": "z" }),
        ] {
            let result = change(|file| file["agents"]["main"]["allowlist"].as_array_mut().unwrap().push(entry.clone()));
            assert!(result.unwrap_err().contains("cannot add or change allowlist entries"), "{entry}");
        }
        let elsewhere = change(|file| file["agents"]["new"] = json!({ "allowlist": [{ "pattern": "/w" }] }));
        assert!(elsewhere.unwrap_err().contains("'new'"));
    }

    #[test]
    fn what_is_no_policy_is_told() {
        for (value, says) in [
            (None, "exec approvals file required"),
            (Some(json!("x")), "exec approvals file required"),
            (Some(json!({})), "exec approvals file version 1 required"),
            (Some(json!({ "version": 2 })), "exec approvals file version 1 required"),
            (Some(json!({ "version": 1, "defaults": { "security": 1 } })), "Invalid exec approvals file"),
            (Some(json!({ "version": 1, "agents": { "*": { "ask": 1 } } })), "Invalid exec approvals file"),
            (Some(json!({ "version": 1, "agents": { "main": { "askFallback": 1 } } })), "Invalid exec approvals file"),
        ] {
            assert_eq!(parse(value.as_ref()), Err(says));
        }
    }
}
