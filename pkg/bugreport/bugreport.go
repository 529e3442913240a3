// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package bugreport packs what is to be known of a node's agent, or of the operator, into one archive that can be handed on: nothing in
// it is a secret. What is taken is named here, one by one; no folder is taken as it is, no program's environment, and no file that the
// driver has not written. All of it is searched for what looks like a secret before it is packed.
package bugreport

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/debugapi"
	"github.com/cilium/networkdriver/pkg/health"
	"github.com/cilium/networkdriver/pkg/statedir"
	"github.com/cilium/networkdriver/pkg/version"
)

// maxFile is the most bytes of one file of the node that are taken.
const maxFile = 4 << 20

// Program is the running program that the report is about. It is [debugapi.Client], but in tests.
type Program interface {
	Dump(context.Context) (json.RawMessage, error)
	Devices(context.Context) ([]debugapi.Device, error)
	Status(context.Context) (health.Status, error)
	Config(context.Context) (map[string]string, error)
	Version(context.Context) (string, error)
	Log(context.Context) ([]byte, error)
}

// Params are what a report is made from.
type Params struct {
	Program Program
	// JournalDir and CDIDir are the agent's folders on the node, for an agent that does not say which they are.
	JournalDir, CDIDir string
	// Links reads the links of the node.
	Links func() ([]Link, error)
	Now   time.Time
}

// part is a file of the archive.
type part struct {
	name    string
	content func(context.Context) ([]byte, error)
}

// Write writes the archive, a tar file that is compressed with gzip. It returns what could not be had, which is also in the archive: a
// report is of most use where something does not work. The error is about the writing.
func Write(ctx context.Context, w io.Writer, p Params) (missing []string, err error) {
	compressed := gzip.NewWriter(w)
	archive := tar.NewWriter(compressed)
	add := func(name string, content []byte) error {
		content = scrub(content)
		if err := archive.WriteHeader(&tar.Header{
			Typeflag: tar.TypeReg, Name: "bugreport/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: p.Now, Format: tar.FormatPAX,
		}); err != nil {
			return err
		}
		_, err := archive.Write(content)
		return err
	}
	config, configErr := p.Program.Config(ctx)
	parts := []part{
		{"version.txt", p.version},
		{"config.json", func(context.Context) ([]byte, error) { return toJSON(withoutSecrets(config), configErr) }},
		{"status.json", func(ctx context.Context) ([]byte, error) { return encode(p.Program.Status(ctx)) }},
		{"devices.json", func(ctx context.Context) ([]byte, error) { return encode(p.Program.Devices(ctx)) }},
		{"tables.json", func(ctx context.Context) ([]byte, error) { return p.Program.Dump(ctx) }},
		{"log.txt", p.Program.Log},
		{"links.json", func(context.Context) ([]byte, error) { return encode(p.Links()) }},
	}
	journal, err := journalParts(folder(config["journal-dir"], p.JournalDir))
	if err != nil {
		missing = append(missing, err.Error())
	}
	specs, err := cdiParts(folder(config["cdi-spec-dir"], p.CDIDir), driversIn(journal))
	if err != nil {
		missing = append(missing, err.Error())
	}
	for _, part := range slices.Concat(parts, journal, specs) {
		content, err := part.content(ctx)
		if err != nil {
			missing = append(missing, part.name+": "+err.Error())
			continue
		}
		if err := add(part.name, content); err != nil {
			return missing, fmt.Errorf("write the report: %w", err)
		}
	}
	if len(missing) > 0 {
		err = add("missing.txt", []byte(strings.Join(missing, "\n")+"\n"))
	}
	if err := errors.Join(err, archive.Close(), compressed.Close()); err != nil {
		return missing, fmt.Errorf("write the report: %w", err)
	}
	return missing, nil
}

func folder(configured, otherwise string) string {
	if configured != "" {
		return configured
	}
	return otherwise
}

// encode encodes what a function has returned.
func encode[T any](value T, err error) ([]byte, error) { return toJSON(value, err) }

func toJSON(value any, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	return json.MarshalIndent(value, "", "  ")
}

// version says which programs and which kernel these are.
func (p Params) version(ctx context.Context) ([]byte, error) {
	running, err := p.Program.Version(ctx)
	if err != nil {
		running = "not known: " + err.Error()
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return nil, fmt.Errorf("ask for the kernel's version: %w", err)
	}
	return fmt.Appendf(nil, "cilium-dbg: %s\nprogram: %s\nkernel: %s %s %s\ntime: %s\n", version.String(), running,
		unix.ByteSliceToString(name.Release[:]), unix.ByteSliceToString(name.Version[:]), unix.ByteSliceToString(name.Machine[:]),
		p.Now.UTC().Format(time.RFC3339)), nil
}

// journalFile is the name of a file that the journal writes.
var journalFile = regexp.MustCompile(`^([a-z0-9]([-a-z0-9]*[a-z0-9])?\.json|[a-z0-9]([-a-z0-9]*[a-z0-9])?\.(names|claim)|id|config)$`)

func journalParts(dir string) ([]part, error) {
	return partsIn("journal", dir, journalFile.MatchString, func(_ string, data []byte) ([]byte, error) { return data, nil })
}

// driversIn are the names of the drivers that the journal's files are of, and the default one.
func driversIn(journal []part) []string {
	drivers := []string{v2alpha1.DefaultDriverName}
	for _, part := range journal {
		data, err := part.content(context.Background())
		if err != nil {
			continue // is reported where the file is packed
		}
		var entry struct {
			Driver string `json:"driver"`
			Config struct {
				Spec struct {
					DriverName string `json:"driverName"`
				} `json:"spec"`
			} `json:"config"`
		}
		if json.Unmarshal(data, &entry) == nil {
			drivers = append(drivers, entry.Driver, entry.Config.Spec.DriverName)
		}
	}
	return drivers
}

// cdiParts are the spec files of the drivers. Those of other vendors may hold anything.
func cdiParts(dir string, drivers []string) ([]part, error) {
	ours := func(name string) bool {
		return strings.HasSuffix(name, ".json") && slices.ContainsFunc(drivers, func(driver string) bool {
			name := strings.TrimPrefix(name, "dra.") // stands before a driver's name that begins with a digit
			return driver != "" && (strings.HasPrefix(name, driver+"-claim_") || strings.HasPrefix(name, driver+"_metadata_"))
		})
	}
	return partsIn("cdi", dir, ours, withoutEnvironment)
}

// driverVariables begin the names of environment variables that the driver gives to containers.
var driverVariables = regexp.MustCompile(`^(NETWORKDRIVER_CLAIM_|PCIDEVICE_)`)

// withoutEnvironment takes out of a spec file the values of environment variables that are not the driver's own.
func withoutEnvironment(name string, data []byte) ([]byte, error) {
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		return nil, fmt.Errorf("%s is no CDI spec file: %w", name, err)
	}
	edits := []*specs.ContainerEdits{&spec.ContainerEdits}
	for i := range spec.Devices {
		edits = append(edits, &spec.Devices[i].ContainerEdits)
	}
	for _, e := range edits {
		environments := []*[]string{&e.Env}
		for _, hook := range e.Hooks {
			environments = append(environments, &hook.Env)
		}
		for _, environment := range environments {
			for i, variable := range *environment {
				if name, _, _ := strings.Cut(variable, "="); !driverVariables.MatchString(name) {
					(*environment)[i] = name + "=" + removed
				}
			}
		}
	}
	return toJSON(spec, nil)
}

// partsIn are the files of a folder that have such names. Links, sockets and the like are not followed.
func partsIn(name, dir string, wanted func(string) bool, clean func(string, []byte) ([]byte, error)) ([]part, error) {
	files, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: there is no folder %s here", name, dir)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	var parts []part
	for _, file := range files {
		if !wanted(file.Name()) || !file.Type().IsRegular() {
			continue
		}
		path := filepath.Join(dir, file.Name())
		parts = append(parts, part{name + "/" + file.Name(), func(context.Context) ([]byte, error) {
			data, err := statedir.Read(path, maxFile)
			if err != nil {
				return nil, err
			}
			return clean(file.Name(), data)
		}})
	}
	return parts, nil
}

// withoutSecrets takes out values of flags that may be secrets by their names. None of the programs' own is one.
func withoutSecrets(config map[string]string) map[string]string {
	kept := make(map[string]string, len(config))
	for name, value := range config {
		if value != "" && secretName.MatchString(name) {
			value = removed
		}
		kept[name] = value
	}
	return kept
}

// removed stands where something was that may be a secret.
const removed = "[removed]"

var secretName = regexp.MustCompile(`(?i)token|passw|secret|credential|private`)

// secrets are what secrets look like in texts, each with what is left of it.
var secrets = []struct {
	pattern *regexp.Regexp
	left    string
}{
	{regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)`), removed},
	// The base64 of "-----BEGIN", as kubeconfigs have keys.
	{regexp.MustCompile(`LS0tLS1CRUdJTi[A-Za-z0-9+/=]+`), removed},
	{regexp.MustCompile(`\beyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*`), removed}, // JWT
	{regexp.MustCompile(`(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}`), "$1 " + removed},
	{regexp.MustCompile(`(://[^\s/@:"]+:)[^\s/@"]+@`), "${1}" + removed + "@"},
	// token=x, "password": "x", client-key-data: x
	{regexp.MustCompile(`(?i)((?:token|passw(?:or)?d|secret|client-key-data|api[-_]?key)["']?\s*[:=]\s*["']?)[^\s"',;{}\[\]]+`),
		"${1}" + removed},
}

// scrub takes out what looks like a secret.
func scrub(content []byte) []byte {
	for _, s := range secrets {
		content = s.pattern.ReplaceAll(content, []byte(s.left))
	}
	return bytes.ToValidUTF8(content, []byte("?"))
}
