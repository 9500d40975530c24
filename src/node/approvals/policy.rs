//! The policy file's contents, and what is in force for an agent.
//!
//! A setting that an agent's own rules leave out is taken from those of `*`, then from the defaults, then from
//! [`Policy::default`]. Members that are not known here are kept when the file is written.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Number, Value};

/// The version of the file.
pub const VERSION: u32 = 1;
/// The agent of a command that names none.
pub const MAIN_AGENT: &str = "main";
/// Stands for every agent.
pub const EVERY_AGENT: &str = "*";
/// An older name of [`MAIN_AGENT`].
const OLD_MAIN_AGENT: &str = "default";

/// Which commands may run at all. The greater allows more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Security {
    /// None.
    Deny,
    /// Those that are listed.
    Allowlist,
    /// All.
    Full,
}

/// When somebody is to be asked. The greater allows less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Ask {
    /// Never.
    Off,
    /// When a command is not listed.
    OnMiss,
    /// Each time.
    Always,
    /// Never; what would be asked about is refused.
    Deny,
}

impl std::fmt::Display for Security {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Security::Deny => "deny",
            Security::Allowlist => "allowlist",
            Security::Full => "full",
        })
    }
}

impl std::fmt::Display for Ask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Ask::Off => "off",
            Ask::OnMiss => "on-miss",
            Ask::Always => "always",
            Ask::Deny => "deny",
        })
    }
}

/// The file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct File {
    /// Always [`VERSION`].
    pub version: u32,
    /// Where other programs of OpenClaw are asked. It is kept for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<Socket>,
    /// What is so for every agent that has no rule of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defaults: Option<Rules>,
    /// The agents' rules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agents: Option<BTreeMap<String, Rules>>,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Where another program is asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Socket {
    /// The socket's path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// A secret. It is never told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// The rules for an agent, or the defaults.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rules {
    /// Which commands may run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security: Option<Security>,
    /// When somebody is asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ask: Option<Ask>,
    /// What may run when nobody can be asked.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "fallback")]
    pub ask_fallback: Option<Security>,
    /// For programs that know skills; no command of a node is a skill's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto_allow_skills: Option<bool>,
    /// The commands that are listed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowlist: Option<Vec<Entry>>,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A listed command.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// How it is told from others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// A glob for the program's path.
    #[serde(default)]
    pub pattern: String,
    /// What its arguments must be like.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arg_pattern: Option<String>,
    /// Which program has made the entry; none, if a person has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// The command, for people to read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command_text: Option<String>,
    /// When it was last relied on, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_used_at: Option<Number>,
    /// The program that was started then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_resolved_path: Option<String>,
    /// The command that was run then. It is not written here: arguments may hold secrets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_used_command: Option<String>,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// What makes an entry the one that it is: two of the same key grant the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key {
    pattern: String,
    arg_pattern: String,
    source: String,
}

impl Entry {
    /// Its key. Letter case counts in a pattern of arguments, and not in one of paths.
    pub fn key(&self) -> Key {
        Key {
            pattern: self.pattern.trim().to_lowercase(),
            arg_pattern: self.arg_pattern.clone().unwrap_or_default(),
            source: self.source.clone().unwrap_or_default(),
        }
    }

    /// What its arguments must be like, if they must be like anything.
    pub fn arg_pattern(&self) -> Option<&str> {
        self.arg_pattern.as_deref().filter(|pattern| !pattern.is_empty())
    }

    /// Whether a program has made it.
    pub fn is_generated(&self) -> bool {
        self.source.as_deref().is_some_and(|source| !source.trim().is_empty())
    }
}

/// A fallback was once a word of [`Ask`].
fn fallback<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Security>, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum Fallback {
        #[serde(alias = "always")]
        Deny,
        #[serde(alias = "on-miss")]
        Allowlist,
        #[serde(alias = "off")]
        Full,
    }
    Ok(Option::deserialize(deserializer)?.map(|fallback| match fallback {
        Fallback::Deny => Security::Deny,
        Fallback::Allowlist => Security::Allowlist,
        Fallback::Full => Security::Full,
    }))
}

/// What is in force for an agent.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// Which commands may run.
    pub security: Security,
    /// When somebody is asked.
    pub ask: Ask,
    /// What may run when nobody can be asked.
    pub ask_fallback: Security,
    /// Whether skills are listed by themselves.
    pub auto_allow_skills: bool,
    /// The commands that are listed.
    pub allowlist: Vec<Entry>,
}

impl Default for Policy {
    /// What is in force without a file.
    fn default() -> Self {
        Policy {
            security: Security::Allowlist,
            ask: Ask::OnMiss,
            ask_fallback: Security::Deny,
            auto_allow_skills: false,
            allowlist: Vec::new(),
        }
    }
}

impl Policy {
    /// What is in force if the file cannot be trusted.
    pub fn closed() -> Self {
        Policy { security: Security::Deny, ask: Ask::Always, ..Policy::default() }
    }

    /// The rules that say so, without the list.
    fn to_rules(&self) -> Rules {
        Rules {
            security: Some(self.security),
            ask: Some(self.ask),
            ask_fallback: Some(self.ask_fallback),
            auto_allow_skills: Some(self.auto_allow_skills),
            ..Rules::default()
        }
    }

    /// Whether a command that was allowed when `self` was in force, because `entry` lists it, may still be run now
    /// that `fresh` is: whether nothing that it relied on has become stricter.
    pub fn still_holds(&self, fresh: &Policy, entry: Option<&Entry>) -> bool {
        let is_listed = |entry: &Entry| fresh.allowlist.iter().any(|other| other.key() == entry.key());
        fresh.security >= self.security
            && fresh.ask <= self.ask
            && fresh.ask_fallback >= self.ask_fallback
            && entry.is_none_or(is_listed)
    }
}

/// The key of an agent's rules.
pub fn agent_key(agent: Option<&str>) -> &str {
    match agent.map(str::trim) {
        None | Some("" | OLD_MAIN_AGENT) => MAIN_AGENT,
        Some(agent) => agent,
    }
}

impl Default for File {
    /// What a file says that is made because there is none.
    fn default() -> Self {
        let (defaults, agents) = (Some(Policy::default().to_rules()), Some(BTreeMap::new()));
        File { version: VERSION, socket: None, defaults, agents, other: Map::new() }
    }
}

impl File {
    /// Reads a file's contents.
    ///
    /// # Errors
    /// What is wrong with them. It holds nothing of the file.
    pub fn parse(contents: &[u8]) -> Result<Self, &'static str> {
        let text = contents.strip_prefix(b"\xef\xbb\xbf").unwrap_or(contents);
        let value: Value = serde_json::from_slice(text).map_err(|_| "it is not JSON")?;
        Self::from_value(value)
    }

    /// Reads JSON.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn from_value(value: Value) -> Result<Self, &'static str> {
        if value.get("version") != Some(&VERSION.into()) {
            return Err("it is not of version 1");
        }
        let mut file: File = serde_json::from_value(value).map_err(|_| "a setting has a value that is not known")?;
        file.rename_old_main();
        Ok(file)
    }

    /// The rules of `default` are those of `main`; where both have one, the latter's count.
    fn rename_old_main(&mut self) {
        let Some(agents) = &mut self.agents else { return };
        let Some(old) = agents.remove(OLD_MAIN_AGENT) else { return };
        let main = agents.entry(MAIN_AGENT.to_owned()).or_default();
        main.security = main.security.or(old.security);
        main.ask = main.ask.or(old.ask);
        main.ask_fallback = main.ask_fallback.or(old.ask_fallback);
        main.auto_allow_skills = main.auto_allow_skills.or(old.auto_allow_skills);
        if let Some(entries) = old.allowlist {
            main.allowlist.get_or_insert_default().extend(entries);
        }
        for (name, value) in old.other {
            main.other.entry(name).or_insert(value);
        }
    }

    /// What the file holds, as text.
    pub fn to_text(&self) -> String {
        format!("{:#}\n", serde_json::to_value(self).expect("its members are JSON"))
    }

    /// The rules of an agent.
    pub fn rules(&self, agent: &str) -> Option<&Rules> {
        self.agents.as_ref()?.get(agent)
    }

    /// The rules of an agent, to change them.
    pub fn rules_mut(&mut self, agent: &str) -> &mut Rules {
        self.agents.get_or_insert_default().entry(agent.to_owned()).or_default()
    }

    /// Every agent that has rules.
    pub fn agents(&self) -> impl Iterator<Item = (&str, &Rules)> {
        self.agents.iter().flatten().map(|(agent, rules)| (agent.as_str(), rules))
    }

    /// What is in force for an agent; for `None`, what the defaults alone say.
    pub fn policy(&self, agent: Option<&str>) -> Policy {
        let every = agent.and_then(|_| self.rules(EVERY_AGENT));
        let own = agent.filter(|agent| *agent != EVERY_AGENT).and_then(|agent| self.rules(agent));
        let layers = || [own, every, self.defaults.as_ref()].into_iter().flatten();
        let usual = Policy::default();
        let mut seen = HashSet::new();
        let entries = [every, own].into_iter().flatten().flat_map(|rules| rules.allowlist.iter().flatten());
        // Two that differ in their source alone are not the same: one may list nothing.
        let is_new = |entry: &&Entry| !entry.pattern.trim().is_empty() && seen.insert(entry.key());
        Policy {
            security: layers().find_map(|rules| rules.security).unwrap_or(usual.security),
            ask: layers().find_map(|rules| rules.ask).unwrap_or(usual.ask),
            ask_fallback: layers().find_map(|rules| rules.ask_fallback).unwrap_or(usual.ask_fallback),
            auto_allow_skills: layers().find_map(|rules| rules.auto_allow_skills).unwrap_or(usual.auto_allow_skills),
            allowlist: entries.filter(is_new).cloned().collect(),
        }
    }

    /// The file as a client may see it: nothing is left to be guessed, and no secret is in it.
    pub fn for_clients(&self) -> Value {
        let path = self.socket.as_ref().and_then(|socket| socket.path.clone()).filter(|path| !path.trim().is_empty());
        let shown = File {
            version: VERSION,
            socket: path.map(|path| Socket { path: Some(path), token: None, other: Map::new() }),
            defaults: Some(self.policy(None).to_rules()),
            agents: Some(self.agents.clone().unwrap_or_default()),
            other: Map::new(),
        };
        serde_json::to_value(shown).expect("its members are JSON")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn file(value: Value) -> File {
        File::from_value(value).unwrap()
    }

    #[test]
    fn what_an_agent_leaves_out_comes_from_all_agents_then_from_the_defaults() {
        let file = file(json!({ "version": 1,
            "defaults": { "security": "full", "ask": "off", "askFallback": "allowlist" },
            "agents": { "*": { "ask": "always", "autoAllowSkills": true }, "a": { "security": "deny" }, "main": {} } }));
        let told = |agent| {
            let policy = file.policy(agent);
            (policy.security, policy.ask, policy.ask_fallback, policy.auto_allow_skills)
        };
        assert_eq!(told(Some("a")), (Security::Deny, Ask::Always, Security::Allowlist, true));
        for agent in ["main", "unknown", "*"] {
            assert_eq!(told(Some(agent)), (Security::Full, Ask::Always, Security::Allowlist, true));
        }
        assert_eq!(told(None), (Security::Full, Ask::Off, Security::Allowlist, false));
        assert_eq!(File::default().policy(Some("main")), Policy::default());
    }

    #[test]
    fn the_lists_of_all_agents_and_of_one_are_joined_and_say_nothing_twice() {
        let file = file(json!({ "version": 1, "agents": {
            "*": { "allowlist": [{ "pattern": "/bin/A" }, { "pattern": " " }] },
            "a": { "allowlist": [{ "pattern": " /bin/a " }, { "pattern": "/bin/a", "argPattern": "x" },
                { "pattern": "/bin/a", "argPattern": "X" }] } } }));
        let listed = |agent| {
            let entries = file.policy(Some(agent)).allowlist;
            entries.into_iter().map(|e| (e.pattern, e.arg_pattern)).collect::<Vec<_>>()
        };
        let every = ("/bin/A".to_owned(), None);
        assert_eq!(listed("b"), std::slice::from_ref(&every));
        assert_eq!(listed("*"), std::slice::from_ref(&every));
        assert_eq!(listed("a"), [every, ("/bin/a".into(), Some("x".into())), ("/bin/a".into(), Some("X".into()))]);
    }

    #[test]
    fn the_old_name_of_the_main_agent_is_understood() {
        let file = file(json!({ "version": 1, "agents": {
            "default": { "security": "deny", "ask": "off", "allowlist": [{ "pattern": "/b" }], "x": 1 },
            "main": { "security": "full", "allowlist": [{ "pattern": "/a" }], "x": 2 } } }));
        assert_eq!(file.agents().map(|(agent, _)| agent).collect::<Vec<_>>(), ["main"]);
        let policy = file.policy(Some(agent_key(Some("default"))));
        assert_eq!((policy.security, policy.ask), (Security::Full, Ask::Off));
        assert_eq!(policy.allowlist.iter().map(|entry| &*entry.pattern).collect::<Vec<_>>(), ["/a", "/b"]);
        assert_eq!(file.rules("main").unwrap().other["x"], 2);
        assert_eq!([None, Some(" "), Some("default"), Some(" b ")].map(agent_key), ["main", "main", "main", "b"]);
    }

    #[test]
    fn a_file_that_is_not_understood_in_full_is_not_used_at_all() {
        for bad in [
            json!({}),
            json!([]),
            json!({ "version": 2 }),
            json!({ "version": "1" }),
            json!({ "version": 1.0 }),
            json!({ "version": 1, "defaults": { "security": "everything" } }),
            json!({ "version": 1, "defaults": { "security": 2 } }),
            json!({ "version": 1, "defaults": { "security": "off" } }),
            json!({ "version": 1, "defaults": { "ask": 0 } }),
            json!({ "version": 1, "agents": { "*": { "askFallback": 2 } } }),
            json!({ "version": 1, "agents": { "a": null } }),
            json!({ "version": 1, "agents": { "a": { "allowlist": ["/bin/ls"] } } }),
            json!({ "version": 1, "agents": { "a": { "allowlist": [{ "pattern": 1 }] } } }),
            json!({ "version": 1, "agents": [] }),
        ] {
            assert!(File::from_value(bad.clone()).is_err(), "{bad}");
        }
        assert!(File::parse(b"{").is_err());
        let empty = File::parse(b"\xef\xbb\xbf{\"version\":1}").unwrap();
        assert_eq!((empty.policy(None), empty.for_clients()), (Policy::default(), File::default().for_clients()));
    }

    #[test]
    fn old_fallbacks_are_understood() {
        for (old, new) in [
            ("always", Security::Deny),
            ("on-miss", Security::Allowlist),
            ("off", Security::Full),
            ("full", Security::Full),
        ] {
            let file = file(json!({ "version": 1, "defaults": { "askFallback": old } }));
            assert_eq!(file.policy(None).ask_fallback, new);
        }
        let nothing = file(json!({ "version": 1, "defaults": { "askFallback": null, "security": null } }));
        assert_eq!(nothing.policy(None), Policy::default());
    }

    #[test]
    fn what_is_not_known_is_kept_and_no_secret_is_told() {
        let value = json!({ "version": 1, "x": [1], "socket": { "path": "/s", "token": "canary", "y": 2 },
            "agents": { "a": { "z": {}, "allowlist": [{ "id": "1", "pattern": "/a", "lastUsedAt": 1.5, "w": 3 }] } } });
        let file = file(value.clone());
        assert_eq!(serde_json::from_str::<Value>(&file.to_text()).unwrap(), value);
        let shown = file.for_clients();
        assert_eq!(
            shown,
            json!({ "version": 1, "socket": { "path": "/s" }, "agents": value["agents"],
                "defaults": { "security": "allowlist", "ask": "on-miss", "askFallback": "deny", "autoAllowSkills": false } })
        );
        assert_eq!(File::default().for_clients()["agents"], json!({}));
    }

    #[test]
    fn an_approval_falls_when_what_it_relied_on_becomes_stricter() {
        let entry = Entry { pattern: "/a".into(), arg_pattern: Some("x".into()), ..Entry::default() };
        let policy = Policy { ask_fallback: Security::Allowlist, allowlist: vec![entry.clone()], ..Policy::default() };
        let holds = |change: &dyn Fn(&mut Policy)| {
            let mut fresh = policy.clone();
            change(&mut fresh);
            policy.still_holds(&fresh, Some(&entry))
        };
        assert!(holds(&|_| {}));
        assert!(holds(&|p| (p.security, p.ask, p.ask_fallback) = (Security::Full, Ask::Off, Security::Full)));
        assert!(holds(&|p| p.allowlist.insert(0, Entry { pattern: "/b".into(), ..Entry::default() })));
        assert!(holds(&|p| p.allowlist[0].last_resolved_path = Some("/a".into())));
        assert!(!holds(&|p| p.security = Security::Deny));
        assert!(!holds(&|p| p.ask = Ask::Always));
        assert!(!holds(&|p| p.ask_fallback = Security::Deny));
        assert!(!holds(&|p| p.allowlist.clear()));
        assert!(!holds(&|p| p.allowlist[0].arg_pattern = Some("y".into())));
        assert!(!holds(&|p| p.allowlist[0].source = Some("allow-always".into())));
        assert!(policy.still_holds(&Policy { allowlist: vec![], ..policy.clone() }, None));
        assert!(!policy.still_holds(&Policy::closed(), None));
    }
}
