// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package metadata is what programs in a pod read about its devices: a file for each request of a claim (KEP-5304), with what
// the ResourceSlice says of the devices, and from when they are in the pod what they are there. Package kubeletplugin writes
// the files as kubelet's calls are answered; [Files] says what is in them, completes them, and removes what is left over.
package metadata

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

	"github.com/cilium/statedb"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime/schema"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	metadataapi "k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"tags.cncf.io/container-device-interface/pkg/parser"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/logonce"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/pause"
)

// The attributes of a device in its pod that no ResourceSlice has. An administrator cannot give attributes of these names.
const (
	// AttributePodMTU is the interface's MTU in the pod in bytes.
	AttributePodMTU = "podMTU"
	// AttributeVLAN is the VLAN that the device is in; a device in none does not have it.
	AttributeVLAN = "vlan"
)

// What package kubeletplugin calls its files by. It has no names for these.
const (
	folder      = "dra-device-metadata"
	fileName    = "metadata.json"
	specInfix   = "_metadata_"
	deviceClass = "metadata"
)

const (
	// repairInterval is how long a spec file may be other than it shall be, if that can be helped.
	repairInterval = 10 * time.Second
	specMode       = fs.FileMode(0o644)
	folderMode     = fs.FileMode(0o755)
)

// versions are those that the files are written in, the newest first.
var versions = []schema.GroupVersion{v1beta1.SchemeGroupVersion}

// Params are what [Files] work with.
type Params struct {
	Logger *slog.Logger
	// Driver is the driver's name, Node the Kubernetes node's.
	Driver, Node string
	// PluginDir is the driver's directory of kubelet's, by a path that is the node's too.
	PluginDir string
	// CDIFolder is where the runtime reads CDI spec files.
	CDIFolder string
	// Client is what kubeletplugin wants to have one of. Files ask it for nothing.
	Client      kubernetes.Interface
	DB          *statedb.DB
	Devices     statedb.Table[*tables.DRADevice]
	Allocations statedb.Table[*tables.DRAAllocation]
	// Owed are the claims that kubelet takes for prepared, or may, although they have no devices: it has containers look for their files.
	Owed func() []tables.ClaimRef
	// Attributes are what the administrator gives a pool's devices.
	Attributes func(pool string) pools.Attributes
}

// Files are the metadata files of a driver's claims on the node.
type Files struct {
	Params

	mu sync.Mutex // guards the fields below, and the spec files
	// failed is why files could not be written, by their paths.
	failed map[string]error
	// specs are what the spec files shall be, by their paths.
	specs map[string][]byte
	// unrepaired are the spec files that are not.
	unrepaired logonce.Problems[string]
}

// New returns the files.
func New(p Params) *Files {
	return &Files{Params: p, failed: map[string]error{}, specs: map[string][]byte{}}
}

// Off says why there are no files, nil if there are: containers could not start if kubelet handed on a CDI device whose name is
// none.
func (f *Files) Off() error {
	if err := parser.ValidateVendorName(f.Driver); err != nil {
		return fmt.Errorf("pods get no metadata of their devices, since the driver's name is no vendor's by the rules of CDI: %w", err)
	}
	return nil
}

// Options have kubelet's calls write and remove the files.
func (f *Files) Options() []kubeletplugin.Option {
	if f.Off() != nil {
		return nil
	}
	return []kubeletplugin.Option{
		kubeletplugin.EnableDeviceMetadata(true, versions), kubeletplugin.CDIDirectory(f.CDIFolder), kubeletplugin.MetadataFileOps(f.Operations()),
	}
}

// Operations are what kubeletplugin writes and removes the files by.
func (f *Files) Operations() kubeletplugin.MetadataFileOperations {
	return kubeletplugin.MetadataFileOperations{
		MkdirAll: func(path string, mode fs.FileMode) error {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.note(path, os.MkdirAll(path, mode))
		},
		WriteFile: func(path string, data []byte, mode fs.FileMode) error {
			f.mu.Lock()
			defer f.mu.Unlock()
			if _, ours := f.claimOf(filepath.Base(path)); ours {
				f.specs[path] = data
			}
			return f.note(path, write(path, data, mode))
		},
		RemoveAll: f.removeFolder,
		Remove:    f.removeSpec,
		Glob:      f.glob,
	}
}

// glob returns the files that there are, and the spec files that shall be there: one that somebody has removed is not to be made again
// when its claim is gone.
func (f *Files) glob(pattern string) ([]string, error) {
	found, err := filepath.Glob(pattern)
	f.mu.Lock()
	defer f.mu.Unlock()
	for path := range f.specs {
		if match, _ := filepath.Match(pattern, path); match && !slices.Contains(found, path) {
			found = append(found, path)
		}
	}
	return found, err
}

// write replaces the file at once. It is not made durable: after a loss of power kubelet prepares every claim again, and the
// runtime's start of a pod waits.
func write(path string, data []byte, mode fs.FileMode) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*.tmp")
	if err != nil {
		return err
	}
	_, err = tmp.Write(data)
	if err = errors.Join(err, tmp.Chmod(mode), tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		_ = os.Remove(tmp.Name())
	}
	return err
}

// note needs the lock.
func (f *Files) note(path string, err error) error {
	delete(f.failed, path)
	if err != nil {
		f.failed[path] = err
	}
	return err
}

// Check says why a claim that kubelet is being told is prepared has no files, nil if it has them or should have none. ids are the
// CDI devices that kubelet is given: kubeletplugin leaves out its own where it cannot write.
func (f *Files) Check(claim tables.ClaimRef, ids []string) error {
	kind := parser.QualifiedName(f.Driver, deviceClass, "")
	if f.Off() != nil || slices.ContainsFunc(ids, func(id string) bool { return strings.HasPrefix(id, kind) }) {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, path := range slices.Sorted(maps.Keys(f.failed)) {
		if path == f.CDIFolder || strings.HasPrefix(path, f.folderOf(claim)+"/") || strings.HasPrefix(path, f.specPrefix()+string(claim.UID)) {
			return fmt.Errorf("write what the pod is to read about its devices: %w", f.failed[path])
		}
	}
	return errors.New("what the pod is to read about its devices could not be written, the agent's log says why")
}

func (f *Files) folderOf(claim tables.ClaimRef) string {
	return filepath.Join(f.PluginDir, folder, claim.Namespace+"_"+claim.Name)
}

func (f *Files) pathOf(claim tables.ClaimRef, request string) string {
	return filepath.Join(f.folderOf(claim), resourceclaim.BaseRequestRef(request), fileName)
}

func (f *Files) specPrefix() string { return filepath.Join(f.CDIFolder, f.Driver+specInfix) }

// Complete adds to a claim's prepared devices what the files are to say of them at this moment.
func (f *Files) Complete(claim kubetypes.UID, devices []kubeletplugin.Device) {
	if f.Off() != nil {
		return
	}
	for row := range f.Allocations.List(f.DB.ReadTxn(), tables.AllocationsByClaim(claim)) {
		for i, d := range devices {
			if d.PoolName == pools.Name(f.Node, row.Pool) && d.DeviceName == row.DeviceName {
				devices[i].Metadata = f.of(row)
			}
		}
	}
}

// of is what there is to say of a row's device.
func (f *Files) of(row *tables.DRAAllocation) *kubeletplugin.DeviceMetadata {
	m := &kubeletplugin.DeviceMetadata{Attributes: f.published(row)}
	a := row.Attachment
	if a == nil {
		return m
	}
	if m.NetworkData = a.NetworkData(); m.NetworkData == nil {
		return m
	}
	mtu := row.Config.MTU()
	if mtu == 0 {
		mtu = row.PreparedDevice.HostState().MTU
	}
	for name, value := range map[string]int{AttributePodMTU: mtu, AttributeVLAN: row.Config.VLAN()} {
		if value != 0 {
			m.Attributes[name] = resourceapi.DeviceAttribute{IntValue: new(int64(value))}
		}
	}
	return m
}

// published are the attributes by which ResourceSlices describe the row's device. Of one that serves no more just now it is
// those in the claim's file.
func (f *Files) published(row *tables.DRAAllocation) map[string]resourceapi.DeviceAttribute {
	described := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
	if entry, _, found := f.Devices.Get(f.DB.ReadTxn(), tables.DeviceByName(row.DeviceName)); found {
		described = pools.Describe(row.Pool, f.Attributes(row.Pool), entry)
	} else if written, err := f.read(row.ClaimRef(), row.Request); err == nil {
		for _, d := range written {
			if d.Pool == pools.Name(f.Node, row.Pool) && d.Name == row.DeviceName {
				described = d.Attributes
				delete(described, AttributePodMTU)
				delete(described, AttributeVLAN)
			}
		}
	}
	attributes := make(map[string]resourceapi.DeviceAttribute, len(described)+2)
	for name, value := range described {
		attributes[string(name)] = value
	}
	return attributes
}

// read returns what the file of a request says of its devices. Without a file, and with that of another claim of the same name,
// the error wraps [fs.ErrNotExist].
func (f *Files) read(claim tables.ClaimRef, request string) ([]metadataapi.Device, error) {
	file, err := os.Open(f.pathOf(claim, request))
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var written metadataapi.DeviceMetadata
	if err := devicemetadata.DecodeMetadataFromStream(json.NewDecoder(file), &written); err != nil {
		return nil, fmt.Errorf("%s: %w", file.Name(), err)
	}
	if written.UID != claim.UID {
		return nil, fmt.Errorf("%s is of another claim: %w", file.Name(), fs.ErrNotExist)
	}
	var devices []metadataapi.Device
	for _, r := range written.Requests {
		devices = append(devices, r.Devices...)
	}
	return devices, nil
}

// Describe has the files say of a claim's devices, which rows, all of the claim's, are about, what the rows say. It is to be done
// before a container starts that reads them: what a container sees is the file as it was then. A claim that an agent without
// files has prepared gets none, since kubelet has no container look for them.
func (f *Files) Describe(rows []*tables.DRAAllocation) error {
	if f.Off() != nil {
		return nil
	}
	claim := rows[0].ClaimRef()
	requests := map[string][]kubeletplugin.Device{}
	for _, row := range rows {
		requests[row.Request] = append(requests[row.Request], kubeletplugin.Device{
			PoolName: pools.Name(f.Node, row.Pool), DeviceName: row.DeviceName, Metadata: f.of(row),
		})
	}
	for _, request := range slices.Sorted(maps.Keys(requests)) {
		devices := requests[request]
		written, err := f.read(claim, request)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			f.Logger.Debug("Kubelet has no metadata for a claim, which an earlier version of the agent may have prepared", "claim", claim, "request", request)
			continue
		case err == nil && f.says(written, devices):
			continue
		case err == nil:
			crashpoint.Here(crashpoint.MetadataBefore)
			err = f.update(claim, request, devices)
			crashpoint.Here(crashpoint.MetadataAfter)
		}
		if err != nil {
			return fmt.Errorf("write what the pod is to read about its devices: claim %s, request %s: %w", claim, request, err)
		}
	}
	return nil
}

// update has kubeletplugin write the file, by a helper that serves nobody: the one that kubelet calls is not there before kubelet
// has the driver registered, and pods are attached to before that.
func (f *Files) update(claim tables.ClaimRef, request string, devices []kubeletplugin.Device) error {
	ctx := context.Background()
	helper, err := kubeletplugin.Start(ctx, nil, append(f.Options(),
		kubeletplugin.DriverName(f.Driver), kubeletplugin.NodeName(f.Node), kubeletplugin.KubeClient(f.Client),
		kubeletplugin.PluginDataDirectoryPath(f.PluginDir),
		kubeletplugin.DRAService(false), kubeletplugin.RegistrationService(false), kubeletplugin.HealthService(false))...)
	if err != nil {
		return err
	}
	defer helper.Stop()
	return helper.UpdateRequestMetadata(ctx, claim.Namespace, claim.Name, claim.UID, request, devices)
}

// says tells whether the file would be the same.
func (f *Files) says(written []metadataapi.Device, devices []kubeletplugin.Device) bool {
	var wanted []metadataapi.Device
	for _, d := range devices {
		m := metadataapi.Device{
			Driver: f.Driver, Pool: d.PoolName, Name: d.DeviceName, NetworkData: d.Metadata.NetworkData,
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{},
		}
		for name, value := range d.Metadata.Attributes {
			m.Attributes[resourceapi.QualifiedName(name)] = value
		}
		wanted = append(wanted, m)
	}
	return equality.Semantic.DeepEqual(written, wanted)
}

// Undescribe removes the files of a claim that is gone, in case that kubelet has not asked for it.
func (f *Files) Undescribe(claim tables.ClaimRef) {
	f.removeAll(func(folder string) bool { return folder == filepath.Base(f.folderOf(claim)) },
		func(uid kubetypes.UID) bool { return uid == claim.UID })
}

// Run has the spec files repaired from time to time, until the context ends.
func (f *Files) Run(ctx context.Context) error {
	for pause.For(ctx, repairInterval) {
		f.Repair()
	}
	return nil
}

// Repair makes the spec files what they shall be, which somebody may have removed: a container that is to have one does not start
// without, and kubelet does not have it made again.
func (f *Files) Repair() {
	f.mu.Lock()
	defer f.mu.Unlock()
	var failed []string
	errs := map[string]error{}
	for path, data := range f.specs {
		if present, err := os.ReadFile(path); err == nil && bytes.Equal(present, data) {
			continue
		}
		err := os.MkdirAll(f.CDIFolder, folderMode)
		if err == nil {
			err = write(path, data, specMode)
		}
		if err != nil {
			failed, errs[path] = append(failed, path), err
			continue
		}
		f.Logger.Info("CDI spec file of what a pod reads about its devices is as it shall be again", "file", path)
	}
	for _, path := range f.unrepaired.Replace(failed...) {
		f.Logger.Error("CDI spec file of what a pod reads about its devices is not as it shall be, it is tried again", "file", path, "error", errs[path])
	}
}

// UndescribeOthers removes the files of all claims but those that have devices and the given ones. They are what an agent left that
// was ended. What stays is kept as it is.
func (f *Files) UndescribeOthers(claims []tables.ClaimRef) {
	f.removeAll(func(folder string) bool {
		return !slices.ContainsFunc(claims, func(c tables.ClaimRef) bool { return folder == filepath.Base(f.folderOf(c)) })
	}, func(uid kubetypes.UID) bool {
		return !slices.ContainsFunc(claims, func(c tables.ClaimRef) bool { return uid == c.UID })
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	left, _ := filepath.Glob(f.specPrefix() + "*.json") // without any there is nothing to keep
	for _, path := range left {
		if data, err := os.ReadFile(path); err == nil {
			f.specs[path] = data
		}
	}
}

// removeAll removes folders by their names, and spec files by the UIDs of their claims.
func (f *Files) removeAll(folders func(string) bool, specs func(kubetypes.UID) bool) {
	var errs []error
	list := func(folder string) []string {
		entries, err := os.ReadDir(folder)
		if !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	for _, name := range list(filepath.Join(f.PluginDir, folder)) {
		if folders(name) {
			errs = append(errs, f.removeFolder(filepath.Join(f.PluginDir, folder, name)))
		}
	}
	names := list(f.CDIFolder)
	wanted, err := f.glob(f.specPrefix() + "*")
	errs = append(errs, err)
	for _, path := range wanted {
		names = append(names, filepath.Base(path))
	}
	for _, name := range names {
		if uid, ours := f.claimOf(strings.TrimPrefix(name, ".")); ours && specs(uid) { // what is hidden was never finished
			errs = append(errs, f.removeSpec(filepath.Join(f.CDIFolder, name)))
		}
	}
	if err := errors.Join(errs...); err != nil {
		f.Logger.Error("What pods have read about their devices is left on the node", "error", err)
	}
}

// claimOf is the claim that a spec file is of.
func (f *Files) claimOf(name string) (claim kubetypes.UID, ours bool) {
	rest, ours := strings.CutPrefix(name, filepath.Base(f.specPrefix()))
	uid, _, isFile := strings.Cut(rest, "_")
	return kubetypes.UID(uid), ours && isFile
}

// removeFolder removes a claim's folder, unless a claim of that name has devices, or is owed some: kubelet may unprepare one that its pod still has,
// and an earlier claim of the same name late.
func (f *Files) removeFolder(path string) error {
	for row := range f.Allocations.All(f.DB.ReadTxn()) {
		if f.folderOf(row.ClaimRef()) == path {
			return nil
		}
	}
	if slices.ContainsFunc(f.Owed(), func(c tables.ClaimRef) bool { return f.folderOf(c) == path }) {
		return nil
	}
	return os.RemoveAll(path)
}

// removeSpec removes a spec file, unless its claim has devices or is owed some.
func (f *Files) removeSpec(path string) error {
	if uid, ours := f.claimOf(filepath.Base(path)); ours {
		for range f.Allocations.List(f.DB.ReadTxn(), tables.AllocationsByClaim(uid)) {
			return nil
		}
		if slices.ContainsFunc(f.Owed(), func(c tables.ClaimRef) bool { return c.UID == uid }) {
			return nil
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.specs, path)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
