// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package cdi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	kubetypes "k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/pause"
)

// repairInterval is how long a file may be other than it shall be, if that can be helped.
const repairInterval = 10 * time.Second

// Files are the CDI spec files of a driver's claims in one folder, one for each claim whose gate is open.
type Files struct {
	log    *slog.Logger
	folder string
	vendor string

	mu sync.Mutex // guards the fields below, and the files
	// open are the contents of the files that shall be there.
	open map[kubetypes.UID][]byte
	// failed is why a file is not as it shall be.
	failed map[kubetypes.UID]error
	// resolved is true when the runtime was seen to read the files, unresolved is set when it was seen not to.
	resolved   bool
	unresolved error
	changed    chan struct{} // closed when one of the three changes
}

// NewFiles returns the files of the driver's claims. The folder need not be there.
func NewFiles(log *slog.Logger, folder, driver string) *Files {
	return &Files{
		log: log, folder: folder, vendor: vendor(driver),
		open: map[kubetypes.UID][]byte{}, failed: map[kubetypes.UID]error{}, changed: make(chan struct{}),
	}
}

// OpenGate lets containers start that list one of the claim's requests, and marks them with the sandbox that the devices
// are in. When it fails, [Files.Repair] tries again until [Files.CloseGate].
func (f *Files) OpenGate(claim kubetypes.UID, sandbox string, requests []string) error {
	content, err := f.spec(claim, sandbox, requests)
	if err != nil {
		return fmt.Errorf("CDI spec of claim %s: %w", claim, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open[claim] = content
	crashpoint.Here(crashpoint.CDIBefore)
	err = f.write(claim, content)
	crashpoint.Here(crashpoint.CDIAfter)
	return f.note(claim, err)
}

// CloseGate holds back containers that list the claim from now on. A failure is kept for [Files.State], and
// [Files.Repair] tries again: it is no reason to leave devices where they are.
func (f *Files) CloseGate(claim kubetypes.UID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.open, claim)
	_ = f.note(claim, f.remove(claim))
}

// CloseOtherGates closes those of all claims but the given ones. They are what an agent left that was ended, or an earlier
// boot of a node whose folder outlives it.
func (f *Files) CloseOtherGates(claims []kubetypes.UID) {
	prefix, suffix, _ := strings.Cut(filepath.Base(f.path("*")), "*")
	entries, err := os.ReadDir(f.folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.log.Error("CDI spec files that a former agent may have left cannot be looked for", "error", err)
	}
	for _, entry := range entries {
		claim, ours := strings.CutPrefix(entry.Name(), prefix)
		claim, isSpec := strings.CutSuffix(claim, suffix)
		if uid := kubetypes.UID(claim); ours && isSpec && !slices.Contains(claims, uid) {
			f.CloseGate(uid)
		}
	}
}

// ReadMarkers returns the markers in a container's environment. A container with a CDI device of the driver and without
// a marker is a sign that the runtime does not resolve CDI devices, and is kept for [Files.State] until there is
// another.
func (f *Files) ReadMarkers(environment, devices []string) []Marker {
	markers := MarkersIn(environment)
	kind := parser.QualifiedName(f.vendor, class, "")
	if len(markers) == 0 && !slices.ContainsFunc(devices, func(id string) bool { return strings.HasPrefix(id, kind) }) {
		return nil
	}
	var err error
	if len(markers) == 0 {
		err = errors.New("the container runtime does not resolve CDI devices, so that containers may start without the devices of " +
			"their pod while the agent is away: enable CDI in the runtime (containerd 1.7: enable_cdi = true, and cdi_spec_dirs)")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if resolved := err == nil; resolved != f.resolved || resolved != (f.unresolved == nil) {
		f.resolved, f.unresolved = resolved, err
		f.notify()
	}
	return markers
}

// Run has the files repaired from time to time, until the context ends.
func (f *Files) Run(ctx context.Context) error {
	for pause.For(ctx, repairInterval) {
		f.Repair()
	}
	return nil
}

// Repair makes the files what they shall be: some could not be written or removed, and others may have been removed by
// somebody else.
func (f *Files) Repair() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for claim := range maps.Clone(f.failed) {
		if _, open := f.open[claim]; !open {
			_ = f.note(claim, f.remove(claim))
		}
	}
	for claim, content := range f.open {
		_ = f.note(claim, f.write(claim, content))
	}
}

// State is how the gate is doing.
type State struct {
	// Resolved says that the runtime was seen to resolve CDI devices. Runtimes with NRI older than 0.10 do not say which
	// devices a container was to have, so that one which resolves none is not told from one that was not asked to.
	Resolved bool
	// Problem is why the gate does not hold or does not open, nil if it does.
	Problem error
}

// State returns the present state, and a channel that is closed when there is another.
func (f *Files) State() (State, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	errs := []error{f.unresolved}
	for _, claim := range slices.Sorted(maps.Keys(f.failed)) {
		errs = append(errs, f.failed[claim])
	}
	return State{f.resolved, errors.Join(errs...)}, f.changed
}

// note keeps what became of a claim's file, and returns it.
func (f *Files) note(claim kubetypes.UID, err error) error {
	before := f.failed[claim]
	switch {
	case err == nil && before == nil, err != nil && before != nil && err.Error() == before.Error():
		return err
	case err == nil:
		delete(f.failed, claim)
		f.log.Info("CDI spec file is as it shall be again", "file", f.path(claim))
	default:
		f.failed[claim] = err
		f.log.Error("CDI spec file of a claim is not as it shall be, it is tried again", "file", f.path(claim), "error", err)
	}
	f.notify()
	return err
}

func (f *Files) notify() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// path is the claim's file, named as CDI names those that come and go.
func (f *Files) path(claim kubetypes.UID) string {
	return filepath.Join(f.folder, f.vendor+"-"+class+"_"+strings.ReplaceAll(string(claim), "/", "_")+".json")
}

// spec has a device for each request, as a container may list one only.
func (f *Files) spec(claim kubetypes.UID, sandbox string, requests []string) ([]byte, error) {
	spec := &specs.Spec{Kind: f.vendor + "/" + class}
	edits := specs.ContainerEdits{Env: []string{Marker{claim, sandbox}.variable()}}
	var names []string
	for _, request := range requests {
		names = append(names, deviceName(claim, request))
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if _, _, _, err := parser.ParseQualifiedName(parser.QualifiedName(f.vendor, class, name)); err != nil {
			return nil, err
		}
		spec.Devices = append(spec.Devices, specs.Device{Name: name, ContainerEdits: edits})
	}
	var err error
	if spec.Version, err = specs.MinimumRequiredVersion(spec); err != nil {
		return nil, err
	}
	return json.Marshal(spec)
}

// write replaces the file at once. One that is right already is left alone, since runtimes read the whole folder anew at
// each change.
func (f *Files) write(claim kubetypes.UID, content []byte) error {
	path := f.path(claim)
	if present, err := os.ReadFile(path); err == nil && bytes.Equal(present, content) {
		return nil
	}
	if err := os.MkdirAll(f.folder, 0o755); err != nil {
		return fmt.Errorf("make the folder of CDI spec files: %w", err)
	}
	next := path + ".next" // CDI reads files by their suffix
	err := os.WriteFile(next, content, 0o644)
	if err == nil {
		err = os.Rename(next, path)
	}
	if err != nil {
		_ = os.Remove(next)
		return fmt.Errorf("write CDI spec file: %w", err)
	}
	return nil
}

func (f *Files) remove(claim kubetypes.UID) error {
	if err := os.Remove(f.path(claim)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove CDI spec file: %w", err)
	}
	return nil
}
