// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package debian

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// source is one entry of apt's configuration.
type source struct {
	uris, suites, components []string
	signedBy                 string
}

// readSources returns what apt is configured with below a directory, which is
// /etc/apt on a real machine.
func readSources(dir string) ([]source, error) {
	var all []source
	for pattern, parse := range map[string]func(string) []source{
		"sources.list":             parseList,
		"sources.list.d/*.list":    parseList,
		"sources.list.d/*.sources": parseDeb822,
	} {
		paths, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return nil, err
		}
		for _, p := range paths {
			data, err := os.ReadFile(p)
			if err != nil {
				return nil, err
			}
			all = append(all, parse(string(data))...)
		}
	}
	return all, nil
}

// parseList reads the one-line format: deb [options] URI suite component...
func parseList(text string) []source {
	var out []source
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != "deb" {
			continue
		}
		var s source
		fields = fields[1:]
		if len(fields) > 0 && strings.HasPrefix(fields[0], "[") {
			for len(fields) > 0 {
				option := strings.Trim(fields[0], "[]")
				if v, ok := strings.CutPrefix(option, "signed-by="); ok {
					s.signedBy = v
				}
				last := strings.HasSuffix(fields[0], "]")
				fields = fields[1:]
				if last {
					break
				}
			}
		}
		if len(fields) < 3 {
			continue
		}
		s.uris, s.suites, s.components = fields[:1], fields[1:2], fields[2:]
		out = append(out, s)
	}
	return out
}

// parseDeb822 reads the format of stanzas with one field a line. Keys that are
// inlined over several lines are not understood and left out.
func parseDeb822(text string) []source {
	var out []source
	fields := map[string]string{}
	flush := func() {
		s := source{
			uris:       strings.Fields(fields["uris"]),
			suites:     strings.Fields(fields["suites"]),
			components: strings.Fields(fields["components"]),
			signedBy:   fields["signed-by"],
		}
		enabled := !slices.Contains([]string{"no", "false", "0"}, strings.ToLower(fields["enabled"]))
		if enabled && slices.Contains(strings.Fields(fields["types"]), "deb") && len(s.uris) > 0 {
			out = append(out, s)
		}
		clear(fields)
	}
	scanner := bufio.NewScanner(strings.NewReader(text))
	for scanner.Scan() {
		line := scanner.Text()
		switch {
		case strings.TrimSpace(line) == "":
			flush()
		case strings.HasPrefix(line, "#"), strings.HasPrefix(line, " "), strings.HasPrefix(line, "\t"):
		default:
			if key, value, ok := strings.Cut(line, ":"); ok {
				fields[strings.ToLower(key)] = strings.TrimSpace(value)
			}
		}
	}
	flush()
	return out
}

// mirror returns the source that serves the main component of a release.
func mirror(sources []source, codename string) (source, error) {
	for _, s := range sources {
		if slices.Contains(s.suites, codename) && slices.Contains(s.components, "main") {
			return s, nil
		}
	}
	return source{}, fmt.Errorf("no apt source has the suite %s with the component main", codename)
}

// list returns lines of a sources.list for suites of the same mirror.
func (s source) list(suites ...string) string {
	keyring := s.signedBy
	if keyring == "" {
		keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
	}
	var b strings.Builder
	for _, suite := range suites {
		fmt.Fprintf(&b, "deb [signed-by=%s] %s %s main\n", keyring, s.uris[0], suite)
	}
	return b.String()
}
